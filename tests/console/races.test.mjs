// Answers that come late.

import assert from "node:assert/strict";
import { test } from "node:test";
import { newest } from "../../service/console/api.js";

const late = () => Promise.withResolvers();

test("only the latest run counts, in whatever order the answers come", async () => {
  const [first, second] = [late(), late()];
  const turn = newest(new AbortController().signal);
  let until;
  const earlier = turn((signal) => ((until = signal), first.promise));
  const later = turn(() => second.promise);
  assert.ok(until.aborted);
  second.resolve("second");
  first.resolve("first");
  assert.equal(await later, "second");
  await assert.rejects(earlier, { name: "AbortError" });
});

test("an answer after the page was left is none", async () => {
  const [answer, leaving] = [late(), new AbortController()];
  const run = newest(leaving.signal)(() => answer.promise);
  leaving.abort();
  answer.resolve("late");
  await assert.rejects(run, { name: "AbortError" });
});
