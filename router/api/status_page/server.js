// The way to the server, with a key where it asks for one. A key is kept as long as this tab.

const NAME = "baton-key";
const TIMEOUT_MS = 8000;

/** The server wants a key, or another one. */
export class KeyWanted extends Error {}

export const key = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

function headers() {
  return key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
}

/** The report that the page shows; raises KeyWanted, or an Error that says what is wrong. */
export async function fetchReport() {
  const response = await fetch("status.json", { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (response.status === 401) throw new KeyWanted((await response.json()).error.message);
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  return response.json();
}

/** The response of a request that streams; raises what the server says instead. */
export async function request(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answers ${response.status}`);
  }
  return response;
}
