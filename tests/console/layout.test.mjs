import assert from "node:assert/strict";
import test from "node:test";

import { labelWidths, readingOrder } from "../../service/console/layout.js";

const at = (x, y = 0) => ({ face: { box: [x, y, x + 10, y + 10] } });

test("faces of a row are sorted by their middle, and a result without a face is last", () => {
  const none = { outcome: "no_face" };
  assert.deepEqual(readingOrder([none, at(30), at(10), at(20)]), [at(10), at(20), at(30), none]);
});

test("rows are read from top to bottom, and the heads of a row need not be level", () => {
  const [tall, short, middle] = [at(0, 0), at(30, 6), at(60, 3)];
  const [left, right] = [at(10, 40), at(50, 44)];
  assert.deepEqual(readingOrder([right, middle, left, short, tall]), [tall, short, middle, left, right]);
});

test("labels of neighbors share the space between them, and end at the edges", () => {
  const boxes = [at(0), at(30), at(80)].map((one) => one.face.box);
  assert.deepEqual(labelWidths(boxes, 100), [1, 3, 3]);
});

test("a face of another row takes no space", () => {
  const boxes = [at(40), at(45, 50)].map((one) => one.face.box);
  assert.deepEqual(labelWidths(boxes, 100), [9, 10]);
});
