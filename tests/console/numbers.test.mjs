import assert from "node:assert/strict";
import { test } from "node:test";

import * as numbers from "../../service/console/numbers.js";

test("a rate is formatted as 1 in N", () => {
  const said = [0.5, 0.333, 0.143, 0.0667, 0.001, 0.00033, 1e-5, 0, 0.9].map(numbers.oneIn);
  assert.deepEqual(said, [
    "1 in 2",
    "1 in 3",
    "1 in 7",
    "1 in 15",
    "1 in 1,000",
    "1 in 3,000",
    "1 in 100,000",
    "never",
    "nearly all",
  ]);
  assert.equal(numbers.many(999_600), "1 million");
});

test("stops are round and fall", () => {
  assert.equal(numbers.STOPS[0], 0.333);
  assert.equal(numbers.STOPS.at(-1), 1e-5);
  assert.ok(numbers.STOPS.every((fpir, i) => i === 0 || fpir < numbers.STOPS[i - 1]));
  const round = /^1 in [1-9],?5?[0,]*$/;
  assert.deepEqual(
    numbers.STOPS.map(numbers.oneIn).filter((said) => !round.test(said)),
    [],
  );
});

test("a share is formatted per hundred, finer if it is small", () => {
  const said = [0, 0.0014, 0.0099, 0.141, 0.99, 0.999, 1].map(numbers.inHundred);
  assert.deepEqual(said, ["hardly any", "1 in 1,000", "1 in 100", "14 in 100", "99 in 100", "nearly all", "all"]);
});

test("durations, sizes and frequencies have suitable units", () => {
  assert.deepEqual([0.2, 1, 89, 90, 7200, 86_400 * 3, 86_400 * 365 * 4].map(numbers.duration), [
    "1 second",
    "1 second",
    "89 seconds",
    "2 minutes",
    "2 hours",
    "3 days",
    "4 years",
  ]);
  assert.deepEqual([0, 999, 1000, 256_802_123].map(numbers.bytes), ["0 bytes", "999 bytes", "1 kB", "257 MB"]);
  assert.equal(numbers.everySo(0.001, 100), "once in 10 days");
  assert.equal(numbers.everySo(0.1, 100), "about 10 times a day");
});

test("ticks are round and in the domain", () => {
  assert.deepEqual(numbers.ticks([0.863, 0.973], 6), [0.88, 0.9, 0.92, 0.94, 0.96]);
  assert.deepEqual(numbers.ticks([0, 1], 2), [0, 0.5, 1]);
});

test("a logarithmic scale maps equal ratios to equal distances, and accepts 0", () => {
  const scale = numbers.logarithmic([1, 1e-4], [0, 100]);
  assert.ok(Math.abs(scale(0.01) - 50) < 1e-9);
  assert.ok(scale(0) > 1000);
});
