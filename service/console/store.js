// Storage of the console in the browser. If storage is forbidden or full, values last as long as the page.

const held = new Map();

/** Return a value or null. `kind`: "sessionStorage" (this tab) or "localStorage" (this computer). */
export function read(kind, name) {
  try {
    return globalThis[kind].getItem(name) ?? held.get(kind + name) ?? null;
  } catch {
    return held.get(kind + name) ?? null;
  }
}

/** Store a value; null removes it. */
export function write(kind, name, value) {
  held.delete(kind + name);
  try {
    if (value === null) globalThis[kind].removeItem(name);
    else globalThis[kind].setItem(name, value);
  } catch {
    if (value !== null) held.set(kind + name, value);
  }
}
