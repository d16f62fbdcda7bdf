// What the service's numbers mean, for people who know nothing of face recognition. Pure: no page is touched here, so
// that every sentence can be tested by itself.

import { counted, whole } from "./numbers.js";

const two = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

/** A probability as a person would say it: “about once in 3,300 searches”. Null where nothing is known. */
export function chance(probability, what = "searches") {
  if (probability === null || probability === undefined) return null;
  if (probability >= 0.9) return "nearly every time";
  if (probability >= 0.5) return "more often than not";
  if (probability < 1e-9) return `less than once in a billion ${what}`;
  const n = 1 / probability;
  return `about once in ${many(n < 10 ? Math.round(n) : n)} ${what}`;
}

/** 3300 as “3,300”, 3300000 as “3.3 million”: two figures are all that an estimate has. */
export function many(n) {
  if (n >= 999.5e6) return `${two.format(n / 1e9)} billion`;
  if (n >= 999.5e3) return `${two.format(n / 1e6)} million`;
  return two.format(n);
}

/** A probability in digits, for the details. */
export function exact(probability) {
  if (probability === null || probability === undefined) return "not known";
  if (probability >= 0.001 || probability === 0) return String(Number(probability.toPrecision(3)));
  const [digits, power] = probability.toExponential(1).split("e-");
  return `${digits} × 10⁻${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

export const similarity = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

/** Two similarities in as many digits as tell them apart: two, or up to four. */
export function apart(one, other) {
  const digits = [2, 3].find((n) => one === other || one.toFixed(n) !== other.toFixed(n)) ?? 4;
  return [one.toFixed(digits), other.toFixed(digits)];
}

/** A gallery's, or a request's, risk. `risk` as the API has it: one of fpir, fmr, threshold. */
export function risk(risk) {
  if (risk.fpir !== undefined) return `takes one stranger in ${many(1 / risk.fpir)} for somebody`;
  if (risk.fmr !== undefined) return `takes two strangers for one in ${many(1 / risk.fmr)} comparisons`;
  return `calls a similarity of ${similarity(risk.threshold)} enough, whatever the risk`;
}

/** The same, short, for a choice. */
export function riskBriefly(risk) {
  if (risk.fpir !== undefined) return `one stranger in ${many(1 / risk.fpir)}`;
  if (risk.fmr !== undefined) return `one pair of strangers in ${many(1 / risk.fmr)}`;
  return `similarity ${similarity(risk.threshold)}`;
}

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
  rejected_quality: { label: "Cannot tell", icon: "warning" },
  rejected_liveness: { label: "Not taken for a person", icon: "warning" },
  error: { label: "Failed", icon: "warning" },
  same: { label: "Same person", icon: "check" },
  different: { label: "Different people", icon: "stranger" },
};

export const called = (one) => one.name || one.subject || one.id;

/** The title and the sentence of one of the `results` of an identification. `subjects`: how many the gallery has, if known. */
export function identity(result, gallery, subjects) {
  const [first, second] = result.candidates ?? [];
  const likely = chance(result.false_alarm_probability);
  const stranger = likely && `A stranger would look this much like somebody in “${gallery}” ${likely}.`;
  switch (result.outcome) {
    case "identified":
      return { title: called(result), text: join(stranger ?? `Enough alike to be ${called(result)}.`) };
    case "uncertain":
      if (second && result.similarity >= result.threshold)
        return {
          title: `${called(first)} or ${called(second)}`,
          text: "Both look so much like this face that the photo cannot tell them apart. Somebody who knows them should look.",
        };
      return {
        title: `Perhaps ${first ? called(first) : "somebody known"}`,
        text: join("Alike, but not enough to say so at this risk.", stranger, "Somebody should look."),
      };
    case "unknown":
      if ((result.reasons ?? []).includes("risk_out_of_reach"))
        return {
          title: "Nobody can be named",
          text: "The risk asked for is so small that no likeness is enough. Choose a less strict one.",
        };
      if (!first && subjects === 0) return { title: "Nobody to compare with", text: `“${gallery}” has nobody enrolled yet.` };
      return {
        title: "Nobody known here",
        text: join(`Nobody in “${gallery}” looks enough like this face.`, likely && `Strangers come as near ${likely}.`),
      };
    case "rejected_quality":
      return { title: "Not good enough to tell", text: "The face was not compared with anybody: an answer would be a guess." };
    case "rejected_liveness":
      return { title: "Perhaps a picture of a person", text: "This gallery looks only for people who stand before the camera." };
    case "no_face":
      return {
        title: "No face found",
        text: "Take a photo in which the face is upright, well lit and not tiny.",
      };
    default:
      return { title: "This photo could not be used", text: result.error?.detail ?? "" };
  }
}

/** The title and the sentence of a verification. `one`, `other`: what the two sides are called. */
export function pair(answer, one = "the first photo", other = "the second") {
  const likely = chance(answer.false_match_probability, "pairs");
  const stranger = likely && `Two different people look this much alike ${likely}.`;
  switch (answer.outcome) {
    case "same":
      return { title: "The same person", text: stranger ?? `The faces in ${one} and ${other} are enough alike.` };
    case "uncertain":
      return {
        title: "Perhaps the same person",
        text: join("Alike, but not enough to say so at this risk.", stranger, "Somebody should look."),
      };
    case "different":
      return { title: "Different people", text: join("Not alike enough to be one person.", stranger) };
    case "no_face":
      return {
        title: "No face to compare",
        text: `There is no face in ${[answer.a, answer.b].map((side, i) => (side.faces_found === 0 ? [one, other][i] : null)).filter(Boolean).join(" and ")}.`,
      };
    case "rejected_quality":
      return { title: "Not good enough to tell", text: "An answer would be a guess." };
    default:
      return { title: "Perhaps a picture of a person", text: "Only people who stand before the camera are compared here." };
  }
}

/** A value that is out of bounds, in words; `face` has the value, `gate` the bound where it is known. */
export function reason(name, face, gate) {
  const q = face?.quality ?? {};
  const figure = (value, digits = 0) => (value === undefined ? "" : value.toFixed(digits));
  switch (name) {
    case "eye_distance_px":
      return `The face is too small: ${figure(q.eye_distance_px)} pixels from eye to eye${gate ? `, and ${figure(gate.min_eye_distance_px)} are needed` : ""}. Come nearer, or use a larger photo.`;
    case "sharpness":
      return "The face is blurred. Hold still, or let the camera focus.";
    case "brightness":
      return q.brightness > 128 ? "The face is too bright. Turn away from the light." : "The face is too dark. Turn to the light.";
    case "contrast":
      return "The face is too flat: hardly any difference between light and dark.";
    case "yaw":
      return "The face is turned too far to the side. Look at the camera.";
    case "not_live":
      return "It looks like a picture of a person, on paper or on a screen.";
    case "not_judged":
      return "Too little of the photo surrounds the face to tell whether a person stood there. Step back from the camera.";
    case "risk_out_of_reach":
      return "No likeness is enough for a risk so small. Choose a less strict one.";
    case "no_face":
      return "No face was found.";
    default:
      return name;
  }
}

/** How good a photo of a face is for recognition, by the score of its quality, 0 to 1. */
export function quality(score) {
  if (score >= 0.8) return "very good";
  if (score >= 0.55) return "good";
  if (score >= 0.3) return "fair";
  return "poor";
}

/** What a face's quality is made of: name, value, whether it is within bounds. */
export function qualities(quality) {
  const within = (name) => !(quality.reasons ?? []).includes(name);
  return [
    ["Size", `${Math.round(quality.eye_distance_px)} pixels from eye to eye`, within("eye_distance_px")],
    ["Sharpness", quality.sharpness.toFixed(1), within("sharpness")],
    ["Brightness", `${Math.round((quality.brightness / 255) * 100)} %`, within("brightness")],
    ["Contrast", quality.contrast.toFixed(1), within("contrast")],
    ["Turned aside", turned(quality.yaw), within("yaw")],
    ["Tilted", `${Math.round(quality.roll_deg)}°`, true],
  ];
}

function turned(yaw) {
  const aside = Math.abs(yaw);
  if (aside < 0.15) return "hardly";
  return aside < 0.4 ? "a little" : "far";
}

/** Many faces in one line, for those who listen: “3 faces: 1 known, 2 strangers.” */
export function summary(results) {
  const faces = results.filter((one) => one.face);
  if (faces.length === 0) return "No face found.";
  const kinds = [
    ["identified", "known", "known"],
    ["uncertain", "not sure", "not sure"],
    ["unknown", "stranger", "strangers"],
    ["rejected_quality", "not good enough to tell", "not good enough to tell"],
    ["rejected_liveness", "not taken for a person", "not taken for people"],
  ];
  const parts = kinds
    .map(([outcome, one, more]) => [faces.filter((face) => face.outcome === outcome).length, one, more])
    .filter(([n]) => n > 0)
    .map(([n, one, more]) => `${n} ${n === 1 ? one : more}`);
  return `${counted(faces.length, "face")}: ${parts.join(", ")}.`;
}

/** Whether the same request may do better later, or with another key. */
export const mayPass = (error) => [0, 401, 403, 429].includes(error.status) || error.status >= 500 || !error.code;

/** What a problem means to whoever sits before the console, where the API's own words speak to programs. */
export function problem(error) {
  return PROBLEMS[error.code]?.(error.document ?? {}) ?? { title: error.title, text: error.message, remedy: error.remedy };
}

const say = (title, text, remedy) => ({ title, text, remedy });
const PROBLEMS = {
  no_face: () => say("No face found", "The photo shows no face that could be recognized.", "Take one in which the face is upright, visible and not tiny."),
  several_faces: () => say("Several faces", "The photo shows more than one person.", "Choose whose face it is."),
  duplicate_subject: (d) =>
    d.subject
      ? say("Already here under another name", `This face looks like “${d.subject}”.`, "If it is the same person, add the photo there.")
      : say("Already here under another name", "This face looks like somebody else who is enrolled.", "Ask somebody who may see who that is."),
  inconsistent_template: () =>
    say("Unlike the other photos", "This face does not look like the photos that are here of this person.", "See whether it is the right person."),
  low_quality: ({ reasons = [], quality: measured }) => {
    const outside = measured ? qualities({ ...measured, reasons }).filter(([, , fine]) => !fine) : [];
    const values = outside.map(([name, value]) => `${name}: ${value}`).join("; ");
    const why = reasons.map((name) => reason(name, { quality: measured }));
    return say("Not a good photo", join(...(why.length ? why : ["A face like this would be recognized badly, or mistaken."]), values && `(${values}.)`), "Use a sharper, brighter, more frontal photo.");
  },
  not_live: () => say("Perhaps a picture of a person", "This gallery enrolls people who stand before the camera.", "Take a photo of the person, with room around the face."),
  image_format: () => say("Not a photo", "This file is no photo that Kith can read.", "Use JPEG, PNG, WebP, HEIC, AVIF, TIFF, BMP or GIF."),
  image_damaged: () => say("A damaged photo", "The file is incomplete, or damaged.", "Copy it again from where it came."),
  image_empty: () => say("An empty file", "There is nothing in this file.", "Choose another one."),
  image_too_large: () => say("Too large a photo", "This photo has more bytes or pixels than the service takes.", "Use a smaller copy of it."),
  overloaded: () => say("Busy just now", "Others are being served.", "Try again in a moment."),
  rate_limited: () => say("Too many requests", "This key has asked as often as it may.", "Try again in a moment."),
  deadline_exceeded: () => say("It took too long", "The service had too much to do to answer in time.", "Try again in a moment."),
  forbidden: (d) =>
    d.scope
      ? say("This key may not do that", `It takes a key with the right “${d.scope}”.`, "Use another key, or ask whoever runs the service for one.")
      : say("This key may not do that", "It takes a key that is for all galleries.", "Use another key, or ask whoever runs the service for one."),
  unauthorized: () => say("A key is needed", "This service answers those who have a key.", "Give one under “API key”."),
  gallery_not_found: () => say("No such gallery", "There is no gallery of this name, or the key is not for it.", "Choose another one."),
  subject_not_found: () => say("No such person", "Nobody is enrolled here under this id.", "Perhaps they were deleted. See the list of people."),
  subject_exists: () => say("This id is taken", "Somebody has it already; nothing of them was changed.", "Choose another id, or add the photo there."),
  gallery_exists: () => say("This name is taken", "There is a gallery of this name already.", "Use it, or choose another name."),
  risk_uncalibrated: () => say("The risk cannot be told", "Nothing is known yet of how strangers look to this model.", "Enroll fifty people, or give the gallery a fixed threshold."),
};

/** An id from a name: “Ada Lovelace” as `ada-lovelace`; letters of all scripts stay. */
export function idFrom(name) {
  return name
    .normalize("NFKD")
    .replace(/(?<=\p{Script=Latin})\p{M}+/gu, "")
    .normalize("NFC")
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-+|-+$/g, "")
    .slice(0, 64);
}

/** Why this can be nobody's id; null where it can. */
export function idRefusal(id) {
  if (/[/\\]/.test(id)) return "An id has no slashes.";
  if (id === "." || id === "..") return "An id is more than one dot or two.";
  if (/\p{C}|[^\P{Z} ]/u.test(id)) return "An id has only signs that can be seen, and plain spaces.";
  return null;
}

/** Why nobody was found: so many have the name; `first`: so many alone are looked through by name, null for all. */
export function unfound(alike, first) {
  if (alike > 1) return "Several are called so: give the id.";
  if (first !== null) return `Nobody has this id. By name only the first ${whole(first)} people are found: give the id.`;
  return "Nobody is enrolled under this name or id.";
}

const TAG = /\s*(?:"((?:[^"]|"")*)"(?=\s*(?:,|$))|([^,]+))/g;

/** Tags as they are typed, with commas between; in quotes what has commas of its own. */
export function tags(text) {
  const found = [...text.matchAll(TAG)].map(([, quoted, plain]) => quoted?.replaceAll('""', '"') ?? plain.trim());
  return [...new Set(found.filter(Boolean))];
}

/** The text that `tags` reads these from. */
export const typedTags = (list) => list.map((one) => (/^"|,|^\s|\s$/.test(one) ? `"${one.replaceAll('"', '""')}"` : one)).join(", ");

/** A value of metadata as it is typed: text as it is, unless it would be read as something else. */
export function typed(value) {
  const plain = typeof value === "string" && value === value.trim() && !/[\r\n]/.test(value);
  return plain && readTyped(value) === value ? value : JSON.stringify(value);
}

/** What was typed as a value: JSON where it is that (12, true, "12"), else text. */
export function readTyped(text) {
  try {
    return parsed(text);
  } catch {
    return text;
  }
}

/** As JSON.parse; numbers that would be written otherwise than they were (1.0, or more digits than a double has) stay as
 * they are, where the browser can do so. */
export function parsed(text) {
  const kept = (_, value, context) =>
    typeof value === "number" && JSON.rawJSON && context?.source !== String(value) ? JSON.rawJSON(context.source) : value;
  return JSON.parse(text, kept);
}

function join(...sentences) {
  return sentences.filter(Boolean).join(" ");
}
