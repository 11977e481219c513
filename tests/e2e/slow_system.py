"""A system whose prefill workers compute nothing that they can have from elsewhere, however short it is."""

from tests.e2e.system import System


class SlowSystem(System):
    """To its prefill workers computing seems slow."""

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        is_prefill = name.startswith("prefill")
        super().start_worker(name, *flags, module=module or ("tests.e2e.slow_prefill" if is_prefill else ""))
