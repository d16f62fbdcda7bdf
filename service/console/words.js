// Sentences that explain results to people without knowledge of face recognition. Pure functions without DOM access, so
// that each sentence can be tested.

import { counted, whole } from "./numbers.js";

const two = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

/** A probability in words: “about once in 3,300 searches”, a bound “less than once in 3,300 searches”. Null if unknown. */
export function chance(probability, isBound = false, what = "searches") {
  if (probability === null || probability === undefined) return null;
  if (probability >= 0.9) return "nearly every time";
  if (probability >= 0.5) return "more often than not";
  if (probability < 1e-9) return `less than once in a billion ${what}`;
  const n = 1 / probability;
  return `${isBound ? "less than" : "about"} once in ${many(n < 10 ? Math.round(n) : n)} ${what}`;
}

/** 3300 as “3,300”, 3300000 as “3.3 million”. Estimates have two significant digits. */
export function many(n) {
  if (n >= 999.5e6) return `${two.format(n / 1e9)} billion`;
  if (n >= 999.5e3) return `${two.format(n / 1e6)} million`;
  return two.format(n);
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

/** The risk of a gallery or request. `risk`: one of fpir, fmr, threshold, as in the API. */
export function risk(risk) {
  if (risk.fpir !== undefined) return `allows 1 wrong match per ${many(1 / risk.fpir)} strangers`;
  if (risk.fmr !== undefined) return `allows 1 wrong match per ${many(1 / risk.fmr)} comparisons`;
  return `accepts a similarity of ${similarity(risk.threshold)}, with unknown risk`;
}

/** The same, short, for a list of options. */
export function riskBriefly(risk) {
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

export const percent = (share) => share.toLocaleString("en", { style: "percent", maximumSignificantDigits: 2 });

export const PRESETS = [
  ["strict", "Strict", "one stranger in 10,000", 0.0001],
  ["standard", "Standard", "one stranger in 1,000", 0.001],
  ["relaxed", "Relaxed", "one stranger in 100", 0.01],
];

export const OUTCOMES = {
  identified: { label: "Known", icon: "check" },
  uncertain: { label: "Not sure", icon: "question" },
  unknown: { label: "Stranger", icon: "stranger" },
  no_face: { label: "No face", icon: "photo" },
  rejected_quality: { label: "Not usable", icon: "warning" },
  rejected_liveness: { label: "Not a live person", icon: "warning" },
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

/** Whether a correction says that the face is not the most similar person. */
const isKnownStranger = (reasons = []) => reasons.includes("known_stranger");

/** Whether another face of the photo has the best candidate. */
const isElsewhere = (reasons = []) => reasons.includes("same_person_elsewhere");

/** Title and sentence for one of the `results` of an identification. `subjects`: number of people in the gallery, if known. */
export function identity(result, gallery, subjects) {
  const [first, second] = result.candidates ?? [];
  const likely = chance(result.false_alarm_probability, result.probability_is_bound);
  const stranger = likely && `A stranger is this similar to a person in “${gallery}” ${likely}.`;
  switch (result.outcome) {
    case "identified":
      return { title: called(result), text: join(stranger ?? `The similarity is high enough for ${called(result)}.`) };
    case "uncertain":
      if (first && result.similarity >= result.threshold && isElsewhere(result.reasons))
        return {
          title: `Perhaps ${called(first)}`,
          text: "Similar enough, but nobody is in a photo twice. A person who knows them should check.",
        };
      if (second && result.similarity >= result.threshold)
        return {
          title: `${called(first)} or ${called(second)}`,
          text: "Both are too similar to this face to tell them apart. A person who knows them should check.",
        };
      return {
        title: `Perhaps ${first ? called(first) : "a known person"}`,
        text: join("Similar, but not enough at this risk.", stranger, "A person should check."),
      };
    case "unknown":
      if ((result.reasons ?? []).includes("risk_out_of_reach"))
        return {
          title: "No match is possible",
          text: "The chosen risk is so small that no similarity is enough. Choose a less strict setting.",
        };
      if (isKnownStranger(result.reasons))
        return {
          title: "A known stranger",
          text: first
            ? `Similar to ${called(first)}, but even more to somebody who is not ${called(first)}.`
            : "Somebody who was mistaken for a known person before.",
        };
      if (!first && subjects === 0)
        return { title: "The gallery is empty", text: `“${gallery}” has no enrolled people yet.` };
      return {
        title: "No match",
        text: join(
          `No person in “${gallery}” is similar enough to this face.`,
          likely && `A stranger is this similar ${likely}.`,
          result.stranger && `Remembered as stranger ${strangerId(result.stranger)}, ${visits(result.stranger)}.`,
        ),
      };
    case "rejected_quality":
      return {
        title: "Photo quality too low",
        text: "Kith did not search for this face: the answer would be a guess.",
      };
    case "rejected_liveness":
      return {
        title: "Perhaps a picture of a person",
        text: "This gallery accepts only live people in front of the camera.",
      };
    case "no_face":
      return { title: "No face found", text: "Take a photo with an upright, well lit and large face." };
    default:
      return { title: "This photo is not usable", text: result.error?.detail ?? "" };
  }
}

/** Title and sentence for a verification. `one`, `other`: names of the two sides. */
export function pair(answer, one = "the first photo", other = "the second") {
  const likely = chance(answer.false_match_probability, answer.probability_is_bound, "pairs");
  const stranger = likely && `Two different people are this similar ${likely}.`;
  switch (answer.outcome) {
    case "same":
      return { title: "The same person", text: stranger ?? `The faces in ${one} and ${other} are similar enough.` };
    case "uncertain":
      return {
        title: "Perhaps the same person",
        text: join("Similar, but not enough at this risk.", stranger, "A person should check."),
      };
    case "different":
      return { title: "Different people", text: join("Not similar enough to be one person.", stranger) };
    case "no_face":
      return {
        title: "No face to compare",
        text: `There is no face in ${[answer.a, answer.b]
          .map((side, i) => (side.face_count === 0 ? [one, other][i] : null))
          .filter(Boolean)
          .join(" and ")}.`,
      };
    case "rejected_quality":
      return { title: "Photo quality too low", text: "The answer would be a guess." };
    default:
      return {
        title: "Perhaps a picture of a person",
        text: "This comparison accepts only live people in front of the camera.",
      };
  }
}

/** A reason in words; `face` has its quality values, `gate` their bounds if known, `other` is the number of the face that it is about. */
export function reason(name, face, gate, other) {
  const q = face?.quality ?? {};
  const figure = (value, digits = 0) => (value === undefined ? "" : value.toFixed(digits));
  switch (name) {
    case "eye_distance_px":
      return `The face is too small: ${figure(q.eye_distance_px)} pixels between the eyes${gate ? `, at least ${figure(gate.min_eye_distance_px)} are needed` : ""}. Move closer, or use a larger photo.`;
    case "sharpness":
      return "The face is blurred. Hold still, or let the camera focus.";
    case "brightness":
      return q.brightness > 128 ? "The face is too bright. Use less light." : "The face is too dark. Use more light.";
    case "contrast":
      return "The contrast is too low. Use more even light.";
    case "yaw":
      return "The face is turned too far to the side. Look at the camera.";
    case "not_live":
      return "The face looks like a picture on paper or on a screen.";
    case "not_judged":
      return "The photo shows too little around the face to check for a live person. Step back from the camera.";
    case "stranger_not_stored":
      return "The stranger could not be remembered: strangers can be neither read nor written now. Ask who runs the service.";
    case "risk_out_of_reach":
      return "No similarity is enough for this risk. Choose a less strict setting.";
    case "weak_detection":
      return "The face was found only just: perhaps the photo is not upright. It sends no event, and nobody is remembered.";
    case "try_detail_medium":
      return "Search with a detail of medium: it also looks at the turned photo.";
    case "known_stranger":
      return "The face is more similar to a corrected mistake than to that person.";
    case "same_person_elsewhere":
      return `${other ? `Face ${other}` : "Another face"} of this photo is more likely the nearest person.`;
    case "no_face":
      return "No face was found.";
    default:
      return name;
  }
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
  const kinds = [
    ["identified", "known", "known"],
    ["uncertain", "not sure", "not sure"],
    ["unknown", "stranger", "strangers"],
    ["rejected_quality", "of low quality", "of low quality"],
    ["rejected_liveness", "not a live person", "not live people"],
  ];
  const parts = kinds
    .map(([outcome, one, more]) => [faces.filter((face) => face.outcome === outcome).length, one, more])
    .filter(([n]) => n > 0)
    .map(([n, one, more]) => `${n} ${n === 1 ? one : more}`);
  return `${counted(faces.length, "face")}: ${parts.join(", ")}.`;
}

/** Return whether the same request can succeed later or with another key. */
export const mayPass = (error) => [0, 401, 403, 429].includes(error.status) || error.status >= 500 || !error.code;

/** An API problem in words for console users. */
export function problem(error) {
  return (
    PROBLEMS[error.code]?.(error.document ?? {}) ?? {
      title: error.title,
      text: sentence(error.message),
      remedy: error.remedy,
    }
  );
}

/** A refused item of a job or an import, in whole sentences: what happened, and what to do. */
export function refusal(problem) {
  const remedy = REMEDIES[problem.code] ?? PROBLEMS[problem.code]?.(problem).remedy ?? problem.remedy;
  return [sentence(problem.detail || problem.title), sentence(remedy)];
}

const REMEDIES = { several_faces: "Retry it with the largest face, or use a photo of one person." };

/** A text with an upper-case first letter and a full stop. Quoted and typed text at the start stays as it is. */
function sentence(text = "") {
  const begun = /^\p{Ll}(?!\S*[_=.(])/u.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[\p{L}\p{N})”"']$/u.test(begun) ? `${begun}.` : begun;
}

const say = (title, text, remedy) => ({ title, text, remedy });
const PROBLEMS = {
  no_face: () =>
    say("No face found", "The photo shows no usable face.", "Take a photo with an upright, visible and large face."),
  several_faces: () => say("Several faces", "The photo shows more than one person.", "Choose the face to enroll."),
  duplicate_subject: (d) =>
    d.subject
      ? say(
          "Already enrolled under another name",
          `This face looks like “${d.subject}”.`,
          "If it is the same person, add the photo there.",
        )
      : say(
          "Already enrolled under another name",
          "This face looks like another enrolled person.",
          "Ask a user whose key can read the gallery.",
        ),
  inconsistent_template: () =>
    say(
      "Unlike the other photos",
      "This face does not look like this person’s other photos.",
      "Check that it is the right person.",
    ),
  low_quality: ({ reasons = [], quality: measured }) => {
    const outside = measured ? qualities({ ...measured, reasons }).filter(([, , fine]) => !fine) : [];
    const values = outside.map(([name, value]) => `${name}: ${value}`).join("; ");
    const why = reasons.map((name) => reason(name, { quality: measured }));
    return say(
      "Not a good photo",
      join(
        ...(why.length ? why : ["This face would often be missed or confused with others."]),
        values && `(${values}.)`,
      ),
      "Use a sharper, brighter, more frontal photo.",
    );
  },
  not_live: () =>
    say(
      "Perhaps a picture of a person",
      "This gallery enrolls only live people in front of the camera.",
      "Take a photo of the person, with space around the face.",
    ),
  overloaded: () => say("The service is busy", "It has too many requests.", "Try again in a moment."),
  forbidden: (d) =>
    d.scope
      ? say(
          "This key lacks a permission",
          `The request needs a key with the scope “${d.scope}”.`,
          "Use another key, or ask the operator of the service for one.",
        )
      : say(
          "This key lacks a permission",
          "The request needs a key for all galleries.",
          "Use another key, or ask the operator of the service for one.",
        ),
  unauthorized: () => say("A key is needed", "This service needs an API key.", "Enter it under “Your key”."),
  gallery_not_found: () =>
    say("No such gallery", "No gallery has this name, or the key is not valid for it.", "Choose another gallery."),
  subject_not_found: () =>
    say(
      "No such person",
      "No enrolled person has this id.",
      "The person may have been deleted. See the list of people.",
    ),
  subject_exists: () =>
    say(
      "This id is taken",
      "Another person has this id. Nothing was changed.",
      "Choose another id, or add the photo there.",
    ),
};

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

// As in kith/wire/identifiers.py. The browser's own classes of characters depend on its version.
const INVISIBLE =
  /[\0-\x1f\x7f-\xa0\xad\u061c\u115f\u1160\u1680\u2000-\u200b\u200e\u200f\u2028-\u202f\u205f-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\ufffd]/u;

/** The reason why a text cannot be an id; null if it can. */
export function idRefusal(id) {
  if (/[/\\]/.test(id)) return "An id cannot contain slashes.";
  if (id === "." || id === "..") return "An id cannot be “.” or “..”.";
  if (INVISIBLE.test(id) || /\p{Noncharacter_Code_Point}/u.test(id))
    return "An id can contain only visible characters and plain spaces.";
  return null;
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

/** A metadata value as typed text: plain, or JSON if plain text would be read as another value. */
export function typed(value) {
  const plain = typeof value === "string" && value === value.trim() && !/[\r\n]/.test(value);
  return plain && readTyped(value) === value ? value : JSON.stringify(value);
}

/** The inverse of `typed`: JSON if it parses (12, true, "12"), otherwise text. */
export function readTyped(text) {
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
