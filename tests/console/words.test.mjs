// What the console says, sentence by sentence. Run by tests/service/api/test_console.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import * as words from "../../service/console/words.js";

const found = (changes) => ({
  outcome: "identified",
  subject: "ada",
  name: "Ada Lovelace",
  similarity: 0.9,
  threshold: 0.8,
  review_threshold: 0.7,
  false_alarm_probability: 0.0003,
  candidates: [
    { subject: "ada", name: "Ada Lovelace", similarity: 0.9 },
    { subject: "grace", name: null, similarity: 0.3 },
  ],
  reasons: [],
  face: { quality: { eye_distance_px: 9.4, brightness: 20, score: 0.2 } },
  ...changes,
});

test("a chance is put in words", () => {
  const said = [0.95, 0.6, 0.4, 0.25, 0.04, 0.0003, 3e-7, 1.2e-9, 1e-12].map((p) => words.chance(p));
  assert.deepEqual(said, [
    "nearly every time",
    "more often than not",
    "about once in 3 searches",
    "about once in 4 searches",
    "about once in 25 searches",
    "about once in 3,300 searches",
    "about once in 3.3 million searches",
    "about once in 830 million searches",
    "less than once in a billion searches",
  ]);
  assert.equal(words.chance(undefined), null);
  assert.equal(words.chance(1 / 490000, true), "less than once in 490,000 searches");
  assert.equal(words.exact(2e-6, true), "at most 2.0 × 10⁻⁶");
});

test("details have exact figures", () => {
  assert.equal(words.exact(0.012345), "0.0123");
  assert.equal(words.exact(0.00015), "1.5 × 10⁻⁴");
  assert.equal(words.exact(null), "unknown");
});

test("a similarity and a threshold get enough digits to differ", () => {
  assert.deepEqual(words.apart(0.8872, 0.8689), ["0.89", "0.87"]);
  assert.deepEqual(words.apart(0.8872, 0.8891), ["0.887", "0.889"]);
  assert.deepEqual(words.apart(0.88721, 0.88724), ["0.8872", "0.8872"]);
  assert.deepEqual(words.apart(0.5, 0.5), ["0.50", "0.50"]);
});

test("an identified person is named, with the probability for strangers", () => {
  const said = words.identity(found({}), "staff");
  assert.equal(said.title, "Ada Lovelace");
  assert.equal(said.text, "A stranger is this similar to a person in “staff” about once in 3,300 searches.");
  assert.equal(words.identity(found({ name: null }), "staff").title, "ada");
});

test("a remembered stranger is told with the visits", () => {
  const unknown = { outcome: "unknown", candidates: [], reasons: [] };
  const stranger = { id: "c1f7a3d95b0e4c6f8a2d7e9b3f5a1c08", seen_count: 1 };
  assert.match(
    words.identity({ ...unknown, stranger }, "door", 2).text,
    /Remembered as stranger c1f7a3d9, seen once\./,
  );
  assert.match(
    words.identity({ ...unknown, stranger: { ...stranger, seen_count: 3 } }, "door", 2).text,
    /seen 3 times\./,
  );
  assert.doesNotMatch(words.identity(unknown, "door", 2).text, /Remembered/);
});

test("uncertain means low similarity or two similar people", () => {
  const little = words.identity(found({ outcome: "uncertain", similarity: 0.75 }), "staff");
  assert.equal(little.title, "Perhaps Ada Lovelace");
  const two = words.identity(found({ outcome: "uncertain", similarity: 0.9 }), "staff");
  assert.equal(two.title, "Ada Lovelace or grace");
});

test("a person in another face of the photo is no second name", () => {
  const elsewhere = found({
    outcome: "uncertain",
    similarity: 0.9,
    subject: undefined,
    reasons: ["same_person_elsewhere"],
  });
  assert.equal(words.identity(elsewhere, "staff").title, "Perhaps Ada Lovelace");
  assert.deepEqual(
    words.peopleToCompare(elsewhere).map((one) => one.subject),
    ["ada"],
  );
  assert.equal(
    words.reason("same_person_elsewhere", null, null, 2),
    "Face 2 of this photo is more likely the nearest person.",
  );
  const moved = found({ subject: "grace", name: null });
  assert.deepEqual(
    words.peopleToCompare(moved).map((one) => one.subject),
    ["grace"],
  );
});

test("a box has a name, and a question if the result is uncertain", () => {
  const said = ["identified", "uncertain", "unknown"].map((outcome) => words.boxLabel(found({ outcome })));
  assert.deepEqual(said, ["Ada Lovelace", "Ada Lovelace?", null]);
});

test("a face is compared with the people that the result names", () => {
  const compared = (changes) => words.peopleToCompare(found(changes)).map((one) => one.subject);
  assert.deepEqual(compared({}), ["ada"]);
  assert.deepEqual(compared({ outcome: "uncertain", similarity: 0.75 }), ["ada"]);
  assert.deepEqual(compared({ outcome: "uncertain" }), ["ada", "grace"]);
  assert.deepEqual(compared({ outcome: "unknown" }), []);
});

test("a known stranger is told whom the face resembles", () => {
  const known = found({ outcome: "unknown", similarity: 0.9, subject: undefined, reasons: ["known_stranger"] });
  assert.equal(words.identity(known, "staff").title, "A known stranger");
  assert.match(words.identity(known, "staff").text, /^Similar to (.+), but even more to someone who is not \1\.$/);
  assert.match(words.identity({ ...known, candidates: [] }, "staff").text, /mistaken/);
  assert.match(words.reason("known_stranger"), /corrected mistake/);
});

test("unknown has a reason", () => {
  assert.match(words.identity(found({ outcome: "unknown" }), "staff").text, /similar enough to/);
  assert.match(
    words.identity(found({ outcome: "unknown", candidates: [] }), "staff", 0).text,
    /no enrolled people yet/,
  );
  assert.match(words.identity(found({ outcome: "unknown", candidates: [] }), "staff", 7).text, /similar enough to/);
  assert.match(
    words.identity(found({ outcome: "unknown", reasons: ["risk_out_of_reach"] }), "staff").text,
    /No similarity is enough/,
  );
});

test("each outcome of the API has a label, an icon and a sentence", () => {
  for (const outcome of [
    "identified",
    "uncertain",
    "unknown",
    "no_face",
    "rejected_quality",
    "rejected_liveness",
    "error",
  ]) {
    assert.ok(words.OUTCOMES[outcome].label && words.OUTCOMES[outcome].icon);
    assert.ok(words.identity(found({ outcome, error: { detail: "damaged" } }), "staff").text);
  }
  for (const outcome of ["same", "uncertain", "different", "no_face", "rejected_quality", "rejected_liveness"]) {
    assert.ok(words.OUTCOMES[outcome].label);
    assert.ok(words.pair({ outcome, a: {}, b: { face_count: 0 } }).text);
  }
});

test("a comparison is described in words", () => {
  const sides = { a: { face_count: 1 }, b: { face_count: 0 } };
  const same = words.pair({ outcome: "same", false_match_probability: 0.0001, ...sides });
  assert.deepEqual(same, {
    title: "The same person",
    text: "Two different people are this similar about once in 10,000 pairs.",
  });
  assert.match(words.pair({ outcome: "no_face", ...sides }).text, /no face in the second\./);
});

test("a risk is put in words", () => {
  const said = [{ fpir: 0.001 }, { fmr: 1e-6 }, { threshold: 0.7 }].map(words.riskInWords);
  assert.deepEqual(said, ["one stranger in 1,000", "one pair of strangers in 1 million", "similarity 0.70"]);
});

test("the misses of a recognizer name the pack that misses fewer", () => {
  const found = { fpir: 0.01, subject_count: 100, fnir: 0.0913, better: { model: "other", fnir: 0.032 } };
  assert.equal(
    words.misses({ display_name: "Kith compact", misses: [found] }),
    "With 100 people enrolled by one photo each, Kith compact misses about 9.1% of their other photos; the pack other misses 3.2% (“kith models pull other”).",
  );
  assert.match(
    words.misses({ display_name: "Other", misses: [{ ...found, better: null }] }),
    /9\.1% of their other photos\.$/,
  );
  assert.equal(words.misses({ display_name: "Uncalibrated", misses: [] }), "");
});

test("metadata survives display and parsing, with numbers beyond a double, outer spaces and colons", () => {
  const values = ["Ada", "12", 12, true, "true", null, { a: [1] }, "", " x", '"q"', "a\nb", "a: b"];
  const names = ["room", "a: b", '"q"', " x ", "", "a\\"];
  for (const metadata of [
    {},
    ...values.map((value) => ({ value })),
    Object.fromEntries(names.map((name) => [name, 1])),
  ])
    assert.deepEqual(words.readMetadata(words.typedMetadata(metadata)), metadata);
  assert.deepEqual(words.readMetadata("  room :12 \n\nhouse:Ockham"), { room: 12, house: "Ockham" });
  for (const number of ["12345678901234567890123", "1.0", "12"]) {
    const text = `{"n":${number}}`;
    assert.equal(JSON.stringify(words.parsed(text)), text);
    assert.equal(JSON.stringify(words.readMetadata(words.typedMetadata(words.parsed(text)))), text);
  }
});

test("a quality problem comes with a remedy", () => {
  const { face } = found({});
  assert.equal(
    words.reason("eye_distance_px", face, { min_eye_distance_px: 12 }),
    "The face is too small: 9 pixels between the eyes, at least 12 are needed. Move closer, or use a larger photo.",
  );
  assert.match(words.reason("brightness", face), /too dark/);
  assert.match(words.reason("brightness", { quality: { brightness: 250 } }), /too bright/);
});

test("several faces have a summary", () => {
  assert.equal(
    words.summary([found({}), found({ outcome: "unknown" }), found({ outcome: "unknown" })]),
    "3 faces: 1 known, 2 strangers.",
  );
  assert.equal(words.summary([{ outcome: "no_face" }]), "No face found.");
});

test("an id is derived from a name in any script", () => {
  assert.equal(words.idFrom("  Ada  Lovelace "), "ada-lovelace");
  assert.equal(words.idFrom("Zoë Łęcka"), "zoe-łecka");
  assert.equal(words.idFrom("山田 がく"), "山田-がく");
  assert.equal(words.idFrom("हिन्दी"), "हिन्दी");
  assert.equal(words.idFrom("𠮷".repeat(70)), "𠮷".repeat(64));
  assert.deepEqual(words.tags("a, b,, a "), ["a", "b"]);
});

test("problems keep the texts of the service, in whole sentences, without the options of commands", () => {
  const forbidden = { code: "forbidden", title: "T", detail: "this needs the scope 'enroll'", remedy: "Or 'x' (--x)" };
  const said = { title: "T", text: "This needs the scope 'enroll'.", remedy: "Or 'x'." };
  assert.deepEqual(words.problem(forbidden), said);
  assert.deepEqual(words.problem(Object.assign(new Error("no"), { document: forbidden })), said);
  const texts = [
    ["the photo shows 6 faces", "The photo shows 6 faces."],
    ["subject: not a text", "Subject: not a text."],
    ["risk.fpir is above 1", "risk.fpir is above 1."],
    ["", "T."],
  ];
  for (const [detail, text] of texts) assert.equal(words.problem({ ...forbidden, detail }).text, text);
  assert.equal(words.problem(new Error("no camera")).text, "No camera.");
});

test("tags with commas and outer spaces are quoted", () => {
  const list = ["a,b", " x ", 'say "hi"', '"q"', '5"', "c"];
  assert.deepEqual(words.tags(words.typedTags(list)), list);
  assert.equal(words.typedTags(["a", "b"]), "a, b");
  assert.deepEqual(words.tags('"a, b'), ['"a', "b"]);
});

test("a failed lookup has a reason", () => {
  assert.match(words.unfound(2), /Several/);
  assert.match(words.unfound(0), /No enrolled person/);
});

test("a refusal for quality names what the photo lacks", () => {
  const quality = { eye_distance_px: 8.4, sharpness: 1.23, brightness: 100, contrast: 30, yaw: 0, roll_deg: 0 };
  const said = words.problem({ code: "low_quality", reasons: ["eye_distance_px", "sharpness"], quality });
  assert.match(said.text, /too small: 8 pixels.*blurred/);
});
