import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { EVENTS, OUTCOMES } from "../../service/console/audit_words.js";

const DOCUMENT = readFileSync(new URL("../../docs/audit.md", import.meta.url), "utf8");

test("all events and outcomes in docs/audit.md have labels", () => {
  const table = DOCUMENT.split("## What is recorded")[1].split("\n\n").find((part) => part.startsWith("| Events"));
  const cells = table.split("\n").slice(2).map((row) => row.split("|")[1]);
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
  assert.deepEqual(outcomes.map(([, name]) => name).filter((name) => !(name in OUTCOMES)), []);
});
