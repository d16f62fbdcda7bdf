// Merge of two people and its undo. Run by tests/service/api/test_console.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { apart, merge } from "../../service/console/merging.js";

const kept = { name: "Ada", metadata: { room: 12 }, tags: ["engine"] };
const gone = { name: "The countess", metadata: { room: 13, house: "Ockham" }, tags: ["engine", "night"] };
const both = { name: "Ada", metadata: { house: "Ockham", room: 12 }, tags: ["engine", "night"] };

test("undo removes only the merged data", () => {
  assert.deepEqual(apart(both, kept, gone), { metadata: { room: 12 }, tags: ["engine"] });
  assert.deepEqual(apart(kept, kept, gone), {});
  assert.deepEqual(apart({ ...kept, name: "The countess" }, { ...kept, name: null }, gone), { name: null });
});

test("undo keeps later changes", () => {
  const since = { name: "Ada L.", metadata: { house: "London", room: 14, floor: 2 }, tags: ["engine", "night", "day"] };
  assert.deepEqual(apart(since, kept, gone), { tags: ["engine", "day"] });
  assert.deepEqual(apart(since, { ...kept, name: null }, gone), { tags: ["engine", "day"] });
});

test("undo keeps the text of numbers", async (t) => {
  const people = {
    countess: `{"name":null,"metadata":{"n":12345678901234567890123,"x":1.0},"tags":[]}`,
    ada: `{"name":"Ada","metadata":{"x":1.0},"tags":[]}`,
  };
  const sent = [];
  t.mock.method(globalThis, "fetch", async (url, { method, body }) => {
    const who = url.pathname.split("/subjects/")[1].split("/")[0];
    if (method !== "GET") sent.push([method, who, body]);
    return new Response(url.pathname.endsWith("/templates") ? `{"data":[],"next":null}` : people[who]);
  });
  const undo = await merge("g", "countess", "ada");
  people.ada = `{"name":"Ada","metadata":{"n":12345678901234567890123,"x":1.0,"y":2.0},"tags":["new"]}`;
  await undo();
  assert.deepEqual(sent.slice(1), [
    ["PUT", "countess", people.countess],
    ["PATCH", "ada", `{"metadata":{"x":1.0,"y":2.0}}`],
  ]);
});
