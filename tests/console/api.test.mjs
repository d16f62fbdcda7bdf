// Requests of the console: paths, answers of something between, and a busy service. Run by tests/service/api/test_console.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  call,
  EVENTS,
  galleryPath,
  patiently,
  Problem,
  subjectPath,
  templatePath,
  unreachable,
} from "../../service/console/api.js";

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

test("a service that is busy or out of reach is asked three times more, unless the pause is long", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const busy = (retryAfter) => Object.assign(new Problem(503, {}), { retryAfter });
  for (const [problem, times, pause] of [
    [busy(30), 4, 30],
    [busy(31), 1, 0],
    [busy(null), 1, 0],
    [unreachable(), 4, 1],
  ]) {
    let asked = 0;
    const ask = async () => {
      asked += 1;
      throw problem;
    };
    const waits = [];
    const onWait = (seconds) => waits.push(seconds) && setImmediate(() => t.mock.timers.tick(seconds * 1000));
    await assert.rejects(patiently(ask, undefined, onWait), problem);
    assert.deepEqual([asked, waits], [times, Array(times - 1).fill(pause)]);
  }
});
