import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { EVENTS, OUTCOMES, sentence } from "../../service/console/audit_words.js";

const DOCUMENT = readFileSync(new URL("../../docs/keys.md", import.meta.url), "utf8");

test("all events and outcomes in docs/keys.md have labels", () => {
  const table = DOCUMENT.split("## What is recorded")[1]
    .split("\n\n")
    .find((part) => part.startsWith("| Events"));
  const cells = table
    .split("\n")
    .slice(2)
    .map((row) => row.split("|")[1]);
  const events = [];
  const outcomes = [];
  for (const cell of cells) {
    const [before, after = ""] = cell.split(": outcome `");
    events.push(...before.matchAll(/`(\w+)`/g));
    outcomes.push(...`\`${after}`.matchAll(/`(\w+)`/g));
  }
  assert.ok(events.length > 25 && outcomes.length > 4);
  const named = new Set(events.map(([, name]) => name));
  assert.deepEqual([...named].sort(), Object.keys(EVENTS).sort());
  assert.deepEqual(
    outcomes.map(([, name]) => name).filter((name) => !(name in OUTCOMES)),
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
