// Requests of the console: paths, answers of something between, and a busy service. Run by tests/service/api/test_console.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { call, EVENTS, galleryPath, patiently, Problem, subjectPath, templatePath } from "../../service/console/api.js";

const UNADDRESSABLE = ["", ".", "..", "g/subjects/p", "a\\b", "a\nb", "\u001b[2J", "a\u0085"];

test("ids that change the address are refused", () => {
  for (const id of UNADDRESSABLE) {
    for (const path of [() => galleryPath(id), () => subjectPath("g", id), () => templatePath("g", "ada", id)])
      assert.throws(
        path,
        (problem) => problem instanceof Problem && problem.code === "invalid_request",
        JSON.stringify(id),
      );
  }
});

test("other ids stay one path segment", () => {
  for (const id of ["...", "%2e%2e", "%2F", "a?b#c", "Zoë 李", "-rf", ":", ". ."]) {
    const parts = new URL(subjectPath("g", id), "http://kith.example").pathname.split("/");
    assert.deepEqual([parts.length, decodeURIComponent(parts[5])], [6, id]);
  }
});

test("a page of something between is told as such, and asks for no key", async () => {
  EVENTS.addEventListener("refused", () => assert.fail("it asks for a key"));
  for (const status of [200, 401, 502]) {
    globalThis.fetch = async () => new Response("<h1>Sign in</h1>", { status });
    await assert.rejects(call("GET", "/v1/jobs"), { code: "waylaid", status: status === 200 ? 0 : status });
  }
});

test("a busy service is asked three times more, unless the pause is long", async () => {
  for (const [retryAfter, times] of [
    [0.001, 4],
    [31, 1],
  ]) {
    let asked = 0;
    const waits = [];
    const ask = async () => {
      asked += 1;
      throw Object.assign(new Problem(503, {}), { retryAfter });
    };
    await assert.rejects(
      patiently(ask, undefined, (seconds) => waits.push(seconds)),
      { status: 503 },
    );
    assert.deepEqual([asked, waits], [times, Array(times - 1).fill(retryAfter)]);
  }
});
