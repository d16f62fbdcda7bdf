// Request paths of the console. Run by tests/service/api/test_console.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { galleryPath, Problem, subjectPath, templatePath } from "../../service/console/api.js";

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
