// What this browser keeps for the console: in the tab, or on this computer. Where it keeps nothing (storage forbidden or
// full), what was said holds as long as the page does.

const held = new Map();

/** `kind`: "sessionStorage" (the tab) or "localStorage" (this computer). Null where nothing is kept. */
export function read(kind, name) {
  try {
    return globalThis[kind].getItem(name) ?? held.get(kind + name) ?? null;
  } catch {
    return held.get(kind + name) ?? null;
  }
}

/** `value` null: forget it. */
export function write(kind, name, value) {
  held.delete(kind + name);
  try {
    if (value === null) globalThis[kind].removeItem(name);
    else globalThis[kind].setItem(name, value);
  } catch {
    if (value !== null) held.set(kind + name, value);
  }
}
