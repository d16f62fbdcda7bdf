// Storage of the console: two services on one host, and a browser that stores nothing.

import assert from "node:assert/strict";
import { test } from "node:test";
import { read, storageName, write } from "../../service/console/store.js";

const store = () => {
  const kept = new Map();
  return {
    kept,
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, value) => kept.set(name, value),
    removeItem: (name) => kept.delete(name),
  };
};

test("a service below a path prefix has names of its own", () => {
  globalThis.localStorage = store();
  write("localStorage", "kith-key", "one");
  assert.deepEqual([...globalThis.localStorage.kept.keys()], [storageName("kith-key")]);
  assert.match(storageName("kith-key"), /^kith-key\/.*\/service\/$/);
  assert.equal(read("localStorage", "kith-key"), "one");
  write("localStorage", "kith-key", null);
  assert.equal(read("localStorage", "kith-key"), null);
});

test("where the browser stores nothing, values last as long as the page", () => {
  const forbidden = () => {
    throw new DOMException("no", "SecurityError");
  };
  Object.defineProperty(globalThis, "sessionStorage", { get: forbidden, configurable: true });
  write("sessionStorage", "kith-key", "one");
  assert.equal(read("sessionStorage", "kith-key"), "one");
  write("sessionStorage", "kith-key", null);
  assert.equal(read("sessionStorage", "kith-key"), null);
});
