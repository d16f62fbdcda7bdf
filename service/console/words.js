// Sentences that explain results to people without knowledge of face recognition. Pure functions without DOM access, so
// that each sentence can be tested.

import { counted, many, whole } from "./numbers.js";

/** A probability in words: “about once in 3,300 searches”, a bound “less than once in 3,300 searches”. Null if unknown. */
export function chance(probability, isBound = false, what = "searches") {
  if (probability === null || probability === undefined) return null;
  if (probability >= 0.9) return "nearly every time";
  if (probability >= 0.5) return "more often than not";
  if (probability < 1e-9) return `less than once in a billion ${what}`;
  const n = 1 / probability;
  return `${isBound ? "less than" : "about"} once in ${many(n < 10 ? Math.round(n) : n)} ${what}`;
}

/** A probability in digits, for details. */
export function exact(probability, isBound = false) {
  if (probability === null || probability === undefined) return "unknown";
  if (isBound) return `at most ${exact(probability)}`;
  if (probability >= 0.001 || probability === 0) return String(Number(probability.toPrecision(3)));
  const [digits, power] = probability.toExponential(1).split("e-");
  return `${digits} × 10⁻${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

export const similarity = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

/** Two similarities with as many digits as they need to differ: two to four. */
export function apart(one, other) {
  const digits = [2, 3].find((n) => one === other || one.toFixed(n) !== other.toFixed(n)) ?? 4;
  return [one.toFixed(digits), other.toFixed(digits)];
}

/** A risk as “one stranger in 1,000”. `risk`: one of fpir, fmr, threshold, as in the API. */
export function riskInWords(risk) {
  if (risk.fpir !== undefined) return `one stranger in ${many(1 / risk.fpir)}`;
  if (risk.fmr !== undefined) return `one pair of strangers in ${many(1 / risk.fmr)}`;
  return `similarity ${similarity(risk.threshold)}`;
}

/** What a recognizer misses in a new gallery, and the one that misses fewer. `model`: as in GET /v1/models. */
export function misses({ display_name: name, misses: [found] }) {
  if (!found) return "";
  const { subject_count: subjects, fnir, better } = found;
  const other = better
    ? `; the pack ${better.model} misses ${percent(better.fnir)} (“kith models pull ${better.model}”)`
    : "";
  return `With ${subjects} people enrolled by one photo each, ${name} misses about ${percent(fnir)} of their other photos${other}.`;
}

const percent = (share) => share.toLocaleString("en", { style: "percent", maximumSignificantDigits: 2 });

/** Name, label, words and rate. */
export const PRESETS = [
  ["strict", "Strict", "one stranger in 10,000", 0.0001],
  ["standard", "Standard", "one stranger in 1,000", 0.001],
  ["relaxed", "Relaxed", "one stranger in 100", 0.01],
];

/** Names and labels of the presets for searches. */
export const SEARCHES = PRESETS.map(([value, name, words]) => [value, `${name}: ${words}`]);

export const OUTCOMES = {
  identified: { label: "Known", icon: "check" },
  uncertain: { label: "Not sure", icon: "question" },
  unknown: { label: "Stranger", several: "Strangers", icon: "stranger" },
  no_face: { label: "No face", icon: "photo" },
  rejected_quality: { label: "Not usable", icon: "warning" },
  rejected_liveness: { label: "Not a live person", several: "Not live people", icon: "warning" },
  error: { label: "Failed", icon: "warning" },
  same: { label: "Same person", icon: "check" },
  different: { label: "Different people", icon: "stranger" },
};

export const called = (one) => one.name || one.subject || one.id;

/** The short id of a remembered stranger. */
export const strangerId = ({ id }) => id.slice(0, 8);

/** How often a remembered stranger was here. */
export const visits = ({ seen_count: visits }) => (visits === 1 ? "seen once" : `seen ${whole(visits)} times`);

/** The text on the box of a face: the name, a question for uncertain faces, otherwise nothing. */
export function boxLabel({ outcome, candidates, ...result }) {
  if (outcome === "identified") return called(result);
  return outcome === "uncertain" && candidates?.length ? `${called(candidates[0])}?` : null;
}

/** The enrolled people that a user compares with a face: the identified one, or those that an uncertain result names. */
export function peopleToCompare({ outcome, subject, candidates = [], similarity, threshold, reasons }) {
  if (outcome === "identified") return candidates.filter((one) => one.subject === subject);
  return outcome === "uncertain" ? candidates.slice(0, similarity >= threshold && !isElsewhere(reasons) ? 2 : 1) : [];
}

/** Whether another face of the photo has the best candidate. */
const isElsewhere = (reasons = []) => reasons.includes("same_person_elsewhere");

/** Title and sentence for one of the `results` of an identification. `subjects`: number of people in the gallery, if known. */
export function identity(result, gallery, subjects) {
  const { candidates: [first, second] = [], similarity, threshold, reasons = [], stranger: seen } = result;
  const likely = chance(result.false_alarm_probability, result.probability_is_bound);
  const stranger = likely && `A stranger is this similar to a person in “${gallery}” ${likely}.`;
  const say = (title, ...text) => ({ title, text: join(...text) });
  const check = "A person who knows them should check.";
  switch (result.outcome) {
    case "identified":
      return say(called(result), stranger ?? `The similarity is high enough for ${called(result)}.`);
    case "uncertain":
      if (first && similarity >= threshold && isElsewhere(reasons))
        return say(`Perhaps ${called(first)}`, "Similar enough, but no one is in a photo twice.", check);
      if (second && similarity >= threshold)
        return say(`${called(first)} or ${called(second)}`, "Both are too similar to this face.", check);
      return say(`Perhaps ${first ? called(first) : "a known person"}`, NOT_ENOUGH, stranger, "A person should check.");
    case "unknown":
      if (reasons.includes("risk_out_of_reach")) return say("No match is possible", REASONS.risk_out_of_reach);
      if (reasons.includes("known_stranger"))
        return say(
          "A known stranger",
          first
            ? `Similar to ${called(first)}, but even more to someone who is not ${called(first)}.`
            : "Someone who was mistaken for a known person before.",
        );
      if (!first && subjects === 0) return say("The gallery is empty", `“${gallery}” has no enrolled people yet.`);
      return say(
        "No match",
        `No person in “${gallery}” is similar enough to this face.`,
        likely && `A stranger is this similar ${likely}.`,
        seen && `Remembered as stranger ${strangerId(seen)}, ${visits(seen)}.`,
      );
    case "rejected_quality":
      return say(POOR, "Kith did not search for this face: the answer would be a guess.");
    case "rejected_liveness":
      return say(SPOOF, "This gallery accepts only live people in front of the camera.");
    case "no_face":
      return say("No face found", "Take a photo with an upright, well lit and large face.");
    default:
      return say("This photo is not usable", result.error?.detail);
  }
}

const NOT_ENOUGH = "Similar, but not enough at this risk.";
const POOR = "Photo quality too low";
const SPOOF = "Perhaps a picture of a person";

/** Title and sentence for a verification. `one`, `other`: names of the two sides. */
export function pair(answer, one = "the first photo", other = "the second") {
  const likely = chance(answer.false_match_probability, answer.probability_is_bound, "pairs");
  const stranger = likely && `Two different people are this similar ${likely}.`;
  const empty = [answer.a?.face_count === 0 && one, answer.b?.face_count === 0 && other].filter(Boolean).join(" and ");
  const [title, ...text] = {
    same: ["The same person", stranger ?? `The faces in ${one} and ${other} are similar enough.`],
    uncertain: ["Perhaps the same person", NOT_ENOUGH, stranger, "A person should check."],
    different: ["Different people", "Not similar enough to be one person.", stranger],
    no_face: ["No face to compare", `There is no face in ${empty}.`],
    rejected_quality: [POOR, "The answer would be a guess."],
    rejected_liveness: [SPOOF, "This comparison accepts only live people in front of the camera."],
  }[answer.outcome];
  return { title, text: join(...text) };
}

const REASONS = {
  sharpness: "The face is blurred. Hold still, or let the camera focus.",
  contrast: "The contrast is too low. Use more even light.",
  yaw: "The face is turned too far to the side. Look at the camera.",
  not_live: "The face looks like a picture on paper or on a screen.",
  not_judged: "The photo shows too little around the face to check for a live person. Step back from the camera.",
  stranger_not_stored:
    "The stranger could not be remembered: strangers can be neither read nor written now. Ask who runs the service.",
  risk_out_of_reach: "No similarity is enough for this risk. Choose a less strict setting.",
  weak_detection:
    "The face was found only just: perhaps the photo is not upright. It sends no event, and no one is remembered.",
  try_detail_medium: "Search with a detail of medium: it also looks at the turned photo.",
  known_stranger: "The face is more similar to a corrected mistake than to that person.",
  no_face: "No face was found.",
};

/** A reason in words; `face` has its quality values, `gate` their bounds if known, `other` is the number of the face that it is about. */
export function reason(name, face, gate, other) {
  const { brightness, eye_distance_px: eyes } = face?.quality ?? {};
  const needed = gate ? `, at least ${gate.min_eye_distance_px.toFixed(0)} are needed` : "";
  if (name === "eye_distance_px")
    return `The face is too small: ${eyes?.toFixed(0) ?? ""} pixels between the eyes${needed}. Move closer, or use a larger photo.`;
  if (name === "brightness")
    return brightness > 128 ? "The face is too bright. Use less light." : "The face is too dark. Use more light.";
  if (name === "same_person_elsewhere")
    return `${other ? `Face ${other}` : "Another face"} of this photo is more likely the nearest person.`;
  return REASONS[name] ?? name;
}

/** A quality score from 0 to 1, in words. */
export function quality(score) {
  if (score >= 0.8) return "very good";
  if (score >= 0.55) return "good";
  if (score >= 0.3) return "fair";
  return "poor";
}

/** The parts of a face's quality: name, value, whether it is within bounds. */
export function qualities(quality) {
  const within = (name) => !(quality.reasons ?? []).includes(name);
  return [
    ["Size", `${Math.round(quality.eye_distance_px)} pixels between the eyes`, within("eye_distance_px")],
    ["Sharpness", quality.sharpness.toFixed(1), within("sharpness")],
    ["Brightness", `${Math.round((quality.brightness / 255) * 100)} %`, within("brightness")],
    ["Contrast", quality.contrast.toFixed(1), within("contrast")],
    ["Turned", turned(quality.yaw), within("yaw")],
    ["Tilted", `${Math.round(quality.roll_deg)}°`, true],
  ];
}

function turned(yaw) {
  const aside = Math.abs(yaw);
  if (aside < 0.15) return "not";
  return aside < 0.4 ? "a little" : "far";
}

/** A summary for screen readers: “3 faces: 1 known, 2 strangers.” */
export function summary(results) {
  const faces = results.filter((one) => one.face);
  if (faces.length === 0) return "No face found.";
  const said = Object.entries(OUTCOMES).flatMap(([outcome, { label, several = label }]) => {
    const count = faces.filter((face) => face.outcome === outcome).length;
    return count > 0 ? `${count} ${(count === 1 ? label : several).toLowerCase()}` : [];
  });
  return `${counted(faces.length, "face")}: ${said.join(", ")}.`;
}

/** Return whether the same request can succeed later or with another key. */
export const mayPass = (error) => [0, 401, 403, 429].includes(error.status) || error.status >= 500 || !error.code;

/** An error in whole sentences: a Problem, its document, or another error. */
export function problem(error) {
  const { code, title, detail, remedy, reasons = [], quality: measured } = error.document ?? error;
  const why = code === "low_quality" && reasons.map((name) => reason(name, { quality: measured }));
  const text = why.length > 0 ? join(...why) : sentence(detail || error.message || title);
  const advice = sentence(remedy?.replaceAll(/ \(--[^)]*\)/g, "")); // without the options of commands
  return { title, text, remedy: advice };
}

export const capitalized = (text) => text[0].toUpperCase() + text.slice(1);

/** A text with an upper-case first letter and a full stop. Quoted and typed text at the start stays as it is. */
function sentence(text = "") {
  const begun = /^\p{Ll}(?!\S*[_=.(])/u.test(text) ? capitalized(text) : text;
  return /[\p{L}\p{N})”"']$/u.test(begun) ? `${begun}.` : begun;
}

/** An id for a name: `ada-lovelace` for “Ada Lovelace”. Letters of all scripts stay. */
export function idFrom(name) {
  return name
    .normalize("NFKD")
    .replace(/(?<=\p{Script=Latin})\p{M}+/gu, "")
    .normalize("NFC")
    .toLowerCase()
    .replace(/[^\p{L}\p{M}\p{N}\u200c\u200d]+/gu, "-")
    .replace(/^-+|-+$/g, "")
    .replace(/^(.{64}).*$/su, "$1");
}

/** Why no person was found. `matches`: people with this name. */
export function unfound(matches) {
  return matches > 1 ? "Several people have this name. Enter the id." : "No enrolled person has this name or id.";
}

const TAG = /\s*(?:"((?:[^"]|"")*)"(?=\s*(?:,|$))|([^,]+))/g;

/** Tags from typed text, separated by commas. Tags with commas are quoted. */
export function tags(text) {
  const found = [...text.matchAll(TAG)].map(([, quoted, plain]) => quoted?.replaceAll('""', '"') ?? plain.trim());
  return [...new Set(found.filter(Boolean))];
}

/** The inverse of `tags`. */
export const typedTags = (list) =>
  list.map((one) => (/^"|,|^\s|\s$/.test(one) ? `"${one.replaceAll('"', '""')}"` : one)).join(", ");

/** Metadata as text, a line each: `room: 12`. A value is plain text, or JSON if plain text would be read as another value. */
export const typedMetadata = (metadata) =>
  Object.entries(metadata)
    .map(([name, value]) => `${/^"|:|^\s|\s$/.test(name) ? JSON.stringify(name) : name}: ${typed(value)}`)
    .join("\n");

function typed(value) {
  const plain = typeof value === "string" && value === value.trim() && !/[\r\n]/.test(value);
  return plain && readTyped(value) === value ? value : JSON.stringify(value);
}

/** The inverse of `typedMetadata`. */
export function readMetadata(text) {
  const lines = [...text.matchAll(/^[^\S\n]*("(?:[^"\\]|\\.)*"|[^:\n]*?)[^\S\n]*:(.*)$/gm)];
  return Object.fromEntries(
    lines.map(([, name, value]) => [/^"/.test(name) ? String(readTyped(name)) : name, readTyped(value.trim())]),
  );
}

/** JSON if it parses (12, true, "12"), otherwise text. */
function readTyped(text) {
  try {
    return parsed(text);
  } catch {
    return text;
  }
}

/** JSON.parse that keeps the text of numbers which a double cannot represent (1.0, many digits), if the browser supports
 * it. */
export function parsed(text) {
  const kept = (_, value, context) =>
    typeof value === "number" && JSON.rawJSON && context?.source !== String(value)
      ? JSON.rawJSON(context.source)
      : value;
  return JSON.parse(text, kept);
}

function join(...sentences) {
  return sentences.filter(Boolean).join(" ");
}
