// Request paths of the console. Run by tests/service/api/test_console.py.

import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { Creation, galleryPath, Problem, subjectPath, templatePath } from "../../service/console/api.js";

const UNADDRESSABLE = ["", ".", "..", "g/subjects/p", "a\\b", "a\nb", "\u001b[2J", "a\u0085"];

test("ids that change the address are refused", () => {
  for (const id of UNADDRESSABLE) {
    for (const path of [() => galleryPath(id), () => subjectPath("g", id), () => templatePath("g", "ada", id)])
      assert.throws(path, (problem) => problem instanceof Problem && problem.code === "invalid_request", JSON.stringify(id));
  }
});

test("other ids stay one path segment", () => {
  for (const id of ["...", "%2e%2e", "%2F", "a?b#c", "Zoë 李", "-rf", ":", ". ."]) {
    const parts = new URL(subjectPath("g", id), "http://kith.example").pathname.split("/");
    assert.deepEqual([parts.length, decodeURIComponent(parts[5])], [6, id]);
  }
});

/** A service whose first answers to creations are lost. Returns the requests as pairs of key and content. */
function losing(answers) {
  const requests = [];
  mock.method(globalThis, "fetch", async (_, { headers, body }) => {
    requests.push([headers.get("Idempotency-Key"), body]);
    if (requests.length <= answers) throw new TypeError("Failed to fetch");
    return new Response(JSON.stringify({ name: "made" }), { status: 201 });
  });
  mock.method(globalThis, "setTimeout", (act) => queueMicrotask(act));
  return requests;
}

test("a creation is repeated with its key, also by the next press", async () => {
  const requests = losing(4);
  const creation = new Creation();
  await assert.rejects(creation.post("/v1/galleries", { name: "a" }), (problem) => problem.code === "unreachable");
  assert.equal(requests.length, 3);
  assert.deepEqual(await creation.post("/v1/galleries", { name: "a" }), { name: "made" });
  assert.equal(requests.length, 5);
  assert.equal(new Set(requests.map(([key]) => key)).size, 1);
  assert.match(requests[0][0], /^[0-9a-f]{32}$/);
  await creation.post("/v1/galleries", { name: "a" });
  await creation.post("/v1/galleries", { name: "b" });
  const [, , , , first, second, third] = requests.map(([key]) => key);
  assert.equal(new Set([first, second, third]).size, 3, "each thing has its own key");
  mock.restoreAll();
});
