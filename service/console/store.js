// Storage of the console in the browser. If storage is forbidden or full, values last as long as the page.

/** URL of the service: the folder above the console's files, because a proxy may serve Kith below a path prefix. */
const SERVICE = new URL("..", import.meta.url);
const held = new Map();

/** The URL of a path such as "/v1/jobs". Everything that is sent to the service goes to such a URL: another program may answer
 * above its prefix. */
export const address = (path) => new URL(`.${path}`, SERVICE);

/** Return the name in the browser's storage. Two services on one host share that storage, and each has its own API key. */
export const storageName = (name) => (SERVICE.pathname === "/" ? name : name + SERVICE.pathname);

/** Return a value or null. `kind`: "sessionStorage" (this tab) or "localStorage" (this computer). */
export function read(kind, name) {
  try {
    return globalThis[kind].getItem(storageName(name)) ?? held.get(kind + name) ?? null;
  } catch {
    return held.get(kind + name) ?? null;
  }
}

/** Store a value; null removes it. */
export function write(kind, name, value) {
  held.delete(kind + name);
  try {
    if (value === null) globalThis[kind].removeItem(storageName(name));
    else globalThis[kind].setItem(storageName(name), value);
  } catch {
    if (value !== null) held.set(kind + name, value);
  }
}
