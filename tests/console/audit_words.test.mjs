import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { OUTCOMES, sentence } from "../../service/console/audit_words.js";

const DOCUMENT = readFileSync(new URL("../../docs/keys.md", import.meta.url), "utf8");

test("all outcomes in docs/keys.md have labels", () => {
  const lists = [...DOCUMENT.matchAll(/^- Outcomes of .*: (.*)/gm)];
  const outcomes = lists.flatMap(([, list]) => [...list.matchAll(/`(\w+)`/g)].map(([, name]) => name));
  assert.ok(outcomes.length > 4);
  assert.deepEqual(
    outcomes.filter((name) => !(name in OUTCOMES)),
    [],
  );
});

test("lines are sentences", () => {
  const line = { gallery: "staff", subject: null, outcome: "done", details: {} };
  const person = { ...line, subject: "3f2a9c01d2e4aaaa" };
  const said = [
    [
      { ...line, event: "searched", details: { outcomes: { identified: 2, unknown: 1 } } },
      "Searched “staff”: 2 known, 1 stranger.",
    ],
    [
      { ...person, event: "verified", outcome: "same" },
      "Compared a photo with person 3f2a9c01 in “staff”: the same person.",
    ],
    [
      { ...person, event: "crop_read", details: { count: 2 } },
      "Looked at 2 stored pictures of person 3f2a9c01 in “staff”.",
    ],
    [
      { ...line, event: "crop_read", details: { count: 4, subjects: ["3f2a", "90cd"], strangers: ["1f"] } },
      "Looked at 4 stored pictures of 2 people and 1 stranger in “staff”.",
    ],
    [
      { ...line, event: "crop_read", details: { count: 3, albums: ["72c0"], faces: ["9f", "a0", "b1"] } },
      "Looked at 3 stored pictures of 1 album in “staff”.",
    ],
    [
      { ...person, event: "templates_enrolled", details: { templates: 1 } },
      "Enrolled 1 photo of person 3f2a9c01 in “staff”.",
    ],
    [
      { ...line, event: "gallery_updated", details: { changed: ["retention_days"] } },
      "Changed settings in “staff”: retention days.",
    ],
    [
      { ...person, event: "subject_deleted", outcome: "repeated" },
      "Erased person 3f2a9c01 in “staff” (repeated after a restore).",
    ],
    [
      { ...line, gallery: null, event: "access_refused", outcome: "forbidden", details: { count: 3 } },
      "Refused 3 requests: the key lacks the scope.",
    ],
    [{ ...line, event: "migration_started" }, "Migration started in “staff”."],
  ];
  for (const [given, expected] of said) assert.equal(sentence(given), expected);
});
