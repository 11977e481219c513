"""A headless Chromium, driven over WebDriver: plain HTTP to chromedriver."""

import asyncio
import json
import shutil
import subprocess
import tempfile
import urllib.request
from typing import Any

IS_THERE = bool(shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome")))
WHY_NOT = "needs Chromium and its driver, of Debian's packages chromium and chromium-driver"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
TIMEOUT_S = 60.0


class Browser:
    """One window of one process; what is asked of it is asked in a thread, as the server under test has the loop."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="baton-browser-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        line = next(line for line in self._driver.stdout if "started successfully on port" in line)
        port = int(line.rstrip(". \n").rpartition(" ")[2])
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={self._profile.name}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url += f"/{self._call('POST', '', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"

    def close(self) -> None:
        self._call("DELETE", "")
        self._driver.terminate()
        self._driver.wait(TIMEOUT_S)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._profile.cleanup()

    async def open(self, url: str, width: int = 1240) -> None:
        """A page in a window of that many pixels, without what was complained of before."""
        await self.errors()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.devtools("Emulation.setDeviceMetricsOverride", size)
        await self._ask("POST", "/url", {"url": url})

    async def prefer(self, **features: str) -> None:
        """As if the reader's settings were these: prefers_color_scheme, prefers_reduced_motion."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.devtools("Emulation.setEmulatedMedia", {"features": told})

    async def run(self, script: str, *args: Any) -> Any:
        """What a function with that body returns in the page."""
        return await self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    async def text(self, selector: str) -> str:
        """All that is shown of an element, "" where there is none."""
        return str(await self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    async def until(self, script: str, what: str, *args: Any) -> Any:
        """Wait for an expression to be true."""
        for _ in range(int(TIMEOUT_S / 0.1)):
            if found := await self.run(f"return {script}", *args):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"never: {what}; complaints: {await self.errors()}")

    async def fill(self, selector: str, text: str) -> None:
        """Write into a field."""
        await self.run("document.querySelector(arguments[0]).value = arguments[1]", selector, text)

    async def click(self, selector: str) -> None:
        await self.run("document.querySelector(arguments[0]).click()", selector)

    async def errors(self) -> list[str]:
        """What the page complained of since it was asked last: errors of scripts, of the policy, of requests."""
        entries = await self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    async def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return await self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(self._call, method, path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)["value"]
