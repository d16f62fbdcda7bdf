import { call, decoysPath, enrollPage, galleryPath, patiently, subjectPage } from "../api.js";
import { galleryDesk, galleryField, riskField } from "../choices.js";
import { each, fill, h, icon } from "../dom.js";
import { readingOrder } from "../layout.js";
import { whole } from "../numbers.js";
import { DESK, bodyOf, clearDesk, cropped, measure, open, picker, stage, thumbnail } from "../photo.js";
import { Pictures, keepHint, sides } from "../stored.js";
import { button, facts, folded, linkButton, outcome, problemBox, table, waiting } from "../ui.js";
import * as words from "../words.js";

export const title = () => "Identify";

export const render = (params, signal) =>
  galleryDesk("Identify", "Find out who is in a photo, and how certain the answer is.", desk, params, signal);

/** The page with at least one gallery: options, then the photo beside the results. */
function desk(known, params, signal) {
  const shots = [];
  let shown = null;
  const strip = h("div.strip", { role: "group", "aria-label": "Photos" });
  const place = h("div.answer");
  const live = h("p.unseen", { role: "status" });
  const galleryOf = (name) => known?.find((one) => one.name === name);
  const risks = h("div");
  let strictness;
  const chosen = galleryField(known, () => (strict(), again()), { chosen: params.gallery });
  const strict = () => {
    const gallery = galleryOf(chosen.value);
    const own = gallery ? words.riskInWords(gallery.risk) : "its own risk";
    const hint = "Wrong matches per stranger.";
    strictness = riskField(again, words.SEARCHES, { own, hint, chosen: strictness?.value?.preset });
    fill(risks, strictness);
    say();
  };
  const summary = h("summary");
  const say = () => fill(summary, `${chosen.value}, ${strictness.told.toLowerCase()}`);
  const options = h("details.details.options", { open: true }, [summary, h("div.choices", [chosen, risks])]);
  strict();

  function again() {
    say();
    for (const shot of shots) {
      if (shot.state === "asking") shot.stop.abort();
      shot.state = "waiting";
    }
    if (shown) show(shown);
    next();
  }

  async function take(files) {
    const first = shots.length;
    for (const file of files)
      shots.push({ photo: await open(file, signal), state: "waiting", results: [], corrected: [], asks: null });
    pick.classList.add("compact");
    if (first === 0 && matchMedia("(width < 52rem)").matches) options.open = false; // room for the answer on the first screen
    show(shots[first]);
    next();
  }

  /** Send one photo at a time, to leave capacity for other users. */
  async function next() {
    if (shots.some((shot) => shot.state === "asking")) return;
    const shot = shots.find((one) => one.state === "waiting");
    if (!shot) return;
    const asked = { gallery: chosen.value, risk: strictness.value };
    shot.state = "asking";
    const stop = (shot.stop = new AbortController());
    shot.problem = shot.pause = null;
    refresh(shot);
    const until = AbortSignal.any([signal, stop.signal]);
    const options = { top_k: 5, detail: "medium", ...(asked.risk && { risk: asked.risk }) };
    const request = { ...bodyOf(shot.photo.file, options), signal: until };
    const onWait = (seconds) => {
      shot.pause = `The service is busy or out of reach. Next attempt in ${seconds} s…`;
      refresh(shot);
    };
    try {
      const ask = () => call("POST", `${galleryPath(asked.gallery)}/identify`, request);
      const answer = await patiently(ask, until, onWait);
      shot.results = readingOrder(answer.results);
      shot.found = answer.images?.[0];
      shot.gallery = asked.gallery;
      const faces = facesOf(shot);
      for (const one of faces) one.other = faces.indexOf(answer.results[one.other_face]) + 1; // 0: no other face
      await measure(shot.photo, until);
      if (shot.state === "asking") shot.state = "done";
    } catch (error) {
      if (signal.aborted || shot.stop !== stop) return; // left the page, or requested again
      if (shot.state === "asking") shot.state = error.name === "AbortError" ? "stopped" : "failed";
      shot.problem = error;
    }
    refresh(shot);
    next();
  }

  function show(shot) {
    shown = shot;
    refresh(shot);
  }

  function refresh(shot) {
    const at = [...strip.children].indexOf(document.activeElement);
    fill(strip, shots.length > 1 && shots.map((one, i) => chip(one, i, one === shown, () => show(one))));
    strip.children[at]?.focus(); // the new element of the same photo
    if (shot !== shown) return;
    fill(place, view(shot));
    if (shot.state !== "done") return;
    live.textContent = told(shot);
    if (shot.asks !== null) place.querySelector(`[aria-label="Face ${shot.asks + 1}"]`)?.focus(); // its button was replaced
    shot.asks = null;
  }

  function view(shot) {
    const { state, problem } = shot;
    const back = () => ((shot.state = "waiting"), show(shot), next());
    const beside = (...content) => h("div.columns", [bare(shot.photo), h("div.stack", content)]);
    if (state === "waiting" || state === "asking") {
      const cancel = () => (state === "waiting" ? ((shot.state = "stopped"), show(shot)) : shot.stop.abort());
      const wait = waiting(shot.pause ?? "Detecting and comparing faces…");
      return beside(h("div.card", [wait, h("div.actions", button("Cancel", cancel))]));
    }
    if (state === "stopped") return beside(h("div.card", [h("p", "Canceled."), button("Try again", back)]));
    if (state === "failed") return beside(problemBox(problem, words.mayPass(problem) && back));
    return answered(shot, galleryOf(shot.gallery), back);
  }

  const pick = picker(take, { signal });
  // Keep the photos for the return from the enrollment page.
  signal.addEventListener("abort", () => {
    DESK.back = DESK.photo && { files: shots.map((one) => one.photo.file), at: shots.indexOf(shown) };
  });
  if (DESK.back) {
    const { files, at } = DESK.back;
    clearDesk();
    queueMicrotask(async () => {
      await take(files);
      show(shots[at]);
    });
  }
  return h("div.stack.wide.desk", [options, pick, live, strip, place]);
}

const facesOf = ({ results }) => results.filter((one) => one.face);

/** A result for screen readers: file, number of faces, names. */
const told = (shot) => {
  const seen = facesOf(shot).map((one) => `${words.identity(one, shot.gallery).title}.`);
  return [`${shot.photo.file.name}.`, words.summary(shot.results), ...seen].join(" ");
};

const STATES = { waiting: "waiting", asking: "in progress", stopped: "canceled", failed: "failed" };

function chip({ state, results, photo }, i, current, onClick) {
  const best = state === "done" && (results.find((one) => one.outcome === "identified") ?? results[0])?.outcome;
  const label = `Photo ${i + 1}, ${photo.file.name}: ${STATES[state] ?? words.summary(results)}`;
  const props = { type: "button", class: `chip ${best || ""}`, "aria-current": current ? "true" : null, onClick };
  return h("button", { ...props, "aria-label": label }, [
    photo.drawable ? h("img", { src: photo.url, alt: "" }) : icon("photo"),
    state === "asking" && h("span.spinner", { "aria-hidden": "true" }),
  ]);
}

export const bare = (photo, marks = []) =>
  photo.drawable
    ? stage(photo, marks, { alt: photo.file.name })
    : h("div.undrawable.empty", [icon("photo"), h("p", photo.file.name)]);

/** The photo with its faces, and a card per face. Pointing at one highlights the other. `again` repeats the search. */
function answered(shot, gallery, again) {
  const { photo, results } = shot;
  const seen = facesOf(shot);
  if (seen.length === 0) {
    const said = called(shot, results[0], gallery);
    const text = [badge(results[0].outcome), h("h2", said.title), h("p", said.text)];
    return h("div.columns", [bare(photo), h("div.card", text)]);
  }
  const pictures = new Pictures(shot.gallery);
  const corrected = seen.map((_, i) => corrections(shot, i).length > 0);
  const isRow = seen.map(({ outcome }, i) => seen.length > 1 && !KNOWN.includes(outcome) && !corrected[i]);
  const cards = seen.map((result, i) => (isRow[i] ? row : card)(result, i, shot, gallery, again, pictures));
  const ranked = (outcome) => cards.filter((_, i) => !corrected[i] && seen[i].outcome === outcome);
  const others = cards.filter((_, i) => isRow[i]);
  const marks = seen.map((result, i) => ({
    face: result.face,
    outcome: result.outcome,
    label: `Face ${i + 1}: ${words.OUTCOMES[result.outcome].label}, ${called(shot, result, gallery).title}`,
    name: words.boxLabel(result),
  }));
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const picture = stage(photo, marks, {
    alt: `${photo.file.name}. ${words.summary(results)}`,
    onChoose: (i) => {
      cards[i].scrollIntoView({ block: "nearest", behavior: still ? "auto" : "smooth" });
      cards[i].focus({ preventScroll: true });
    },
    onPoint: (i, on) => cards[i].classList.toggle("pointed", on),
  });
  cards.forEach((one, i) => {
    for (const name of ["pointerenter", "focusin"]) one.addEventListener(name, () => picture.point(i, true));
    for (const name of ["pointerleave", "focusout"]) one.addEventListener(name, () => picture.point(i, false));
  });
  return h("div.stack", [
    h("h2", words.summary(results)),
    shot.found?.truncated &&
      h("p.hint", `The photo shows ${whole(shot.found.face_count)} faces. Only the largest are searched for.`),
    h("div.columns", [
      h("div.beside", picture),
      h("div.stack", [
        cards.filter((_, i) => corrected[i]),
        ranked("identified"),
        ranked("uncertain"),
        others.length > 0
          ? h("section.card.face-rows", { "aria-label": "Other faces" }, others)
          : cards.filter((_, i) => !corrected[i] && !KNOWN.includes(seen[i].outcome)),
      ]),
    ]),
  ]);
}

const KNOWN = ["identified", "uncertain"];

export const badge = (kind) => outcome(kind, words.OUTCOMES[kind].icon, words.OUTCOMES[kind].label);

const called = (shot, result, gallery) => words.identity(result, shot.gallery, gallery?.subject_count);
const person = (shot, one) => h("a", { href: subjectPage(shot.gallery, one.subject) }, words.called(one));

/** A link to the enrollment of a face, as a new person or as `subject`, "" for one to be chosen. */
const enrollLink = (shot, result, label, kind, subject, props) =>
  linkButton(label, enrollPage(shot.gallery, subject), {
    kind,
    icon: "enroll",
    small: true,
    onClick: () => Object.assign(DESK, { photo: shot.photo, box: result.face.box }),
    ...props,
  });

/** The corrections of a face in the gallery that was searched. */
const corrections = (shot, i) => shot.corrected.filter((one) => one.face === i && one.gallery === shot.gallery);

/** “Not Ada”: note that the face is another person, and search again. Each correction can be undone. */
function correction(result, i, shot, again) {
  const faces = facesOf(shot);
  const turn = () => ((shot.asks = i), again());
  const noted = corrections(shot, i).map((done) => {
    const undo = async () => {
      await call("DELETE", `${decoysPath(done.gallery, done.subject)}/${done.decoy}`);
      shot.corrected.splice(shot.corrected.indexOf(done), 1);
      turn();
    };
    return h("p.row", [`Noted: this is not ${done.name}.`, button("Undo", undo, { small: true })]);
  });
  if (result.outcome !== "identified" || (faces.length > 1 && !shot.photo.drawable)) return noted; // it cannot be cropped
  const { gallery, photo } = shot;
  const { subject, face } = result;
  const name = words.called(result);
  const note = async () => {
    const others = faces.filter((one) => one !== result).map((one) => one.face);
    const file = others.length ? await cropped(photo, face, others) : photo.file;
    const request = bodyOf(file, { face: "largest", allow_low_quality: true }); // it was good enough to be answered
    const made = await call("POST", decoysPath(gallery, subject), request);
    shot.corrected.push({ face: i, gallery, subject, name, decoy: made.id });
    turn();
  };
  const not = button(`Not ${name}`, note, { kind: "quiet", icon: "close", small: true });
  return [noted, h("div.actions", not)];
}

/** A person, or someone who may be one. */
function card(result, i, shot, gallery, again, pictures) {
  const { outcome: answer, face } = result;
  const people = words.peopleToCompare(result);
  const enroll = (...wanted) => enrollLink(shot, result, ...wanted);
  const asks = answer !== "identified" && corrections(shot, i).length > 0;
  const who = answer === "identified" ? person(shot, result) : called(shot, result, gallery).title;
  const stored = (one) => [
    words.called(one),
    pictures.of({ subject: one.subject }, `Stored picture of ${words.called(one)}`),
  ];
  return h("article", { class: `card face-card ${answer}`, tabindex: "-1", "aria-label": `Face ${i + 1}` }, [
    h("div.face-head", [h("span.face-number", `${i + 1}`), h("h3.name", asks ? "Who is it?" : who), badge(answer)]),
    sides([["This photo", thumbnail(shot.photo, face.box, 96)], ...(gallery?.keep_crops ? people : []).map(stored)]),
    evidence(result, shot, gallery),
    h("div.actions", [
      asks && [enroll("A new person", "primary"), enroll("Someone enrolled", "plain", "")],
      !asks && answer === "unknown" && enroll("Enroll this face", "primary"),
      answer === "identified" && enroll("Add this photo", "plain", result.subject),
      answer === "uncertain" &&
        people.map((one) => enroll(`It is ${words.called(one)}: add this photo`, "plain", one.subject)),
      !asks && KNOWN.includes(answer) && enroll("Another person", "quiet"),
    ]),
    correction(result, i, shot, again),
    answer === "uncertain" && gallery && !gallery.keep_crops && keepHint(shot.gallery),
    details(result, shot, gallery, pictures),
  ]);
}

/** A stranger, or a face that was not searched for, among others: one line, which opens. */
function row(result, i, shot, gallery, again, pictures) {
  const stranger = result.outcome === "unknown";
  const label = { ariaLabel: "Enroll this face" };
  return h("article", { class: `face-row ${result.outcome}`, tabindex: "-1", "aria-label": `Face ${i + 1}` }, [
    folded(
      [
        h("span.face-number", `${i + 1}`),
        thumbnail(shot.photo, result.face.box, 40),
        h("h3", stranger ? "A stranger" : called(shot, result, gallery).title),
      ],
      [evidence(result, shot, gallery), details(result, shot, gallery, pictures)],
    ),
    stranger && enrollLink(shot, result, "Enroll", "quiet", undefined, label),
  ]);
}

/** Why the answer is this one: in words, as a meter, and by what the photo lacks. */
const evidence = (result, shot, gallery) => [
  h("p", called(shot, result, gallery).text),
  result.similarity !== undefined && meter(result),
  result.reasons.length > 0 &&
    each("ul.bullets", result.reasons, (name) =>
      h("li", words.reason(name, result.face, gallery?.quality_gate, result.other)),
    ),
  quality(result.face),
];

const LIVENESS = { live: "a live person", not_live: "a picture of a person", not_judged: "unknown" };

/** A note about low quality or liveness. */
function quality({ quality: { score }, liveness }) {
  const poor = score < 0.55 && `The photo quality is ${words.quality(score)}. `;
  return (poor || liveness) && h("p.hint", [poor, liveness && `Liveness: ${LIVENESS[liveness.verdict]}.`]);
}

/** A meter of similarity, threshold and review threshold, with a text for screen readers. */
export function meter({ similarity, threshold, review_threshold: review }) {
  const from = meterStart(similarity, review);
  const at = (value) => `${(Math.max(0, Math.min(1, value) - from) / (1 - from)) * 100}%`;
  const [reached, needed] = words.apart(similarity, threshold);
  const told = `Similarity ${reached}. The threshold is ${needed}, the review threshold ${words.similarity(review)}.`;
  const kind = similarity >= threshold ? "enough" : similarity >= review ? "near" : "far";
  return h("div.meter-block", [
    h("div", { class: `meter ${kind}`, role: "img", "aria-label": told }, [
      h("span.meter-fill", { style: { width: at(similarity) } }),
      review < threshold &&
        h("span.meter-zone", { style: { left: at(review), right: `calc(100% - ${at(threshold)})` } }),
      h("span.meter-mark", { style: { left: at(threshold) } }),
    ]),
    h("p.meter-words", { "aria-hidden": "true" }, [
      h("span", ["Similarity ", h("strong", reached)]),
      h("span", threshold > 1 ? "nothing is enough" : `enough from ${needed}`),
    ]),
  ]);
}

/** Where the scale begins: what matters lies about the threshold, and that is near 1 for some recognizers. */
const meterStart = (similarity, review) => Math.max(-1, Math.min(2.5 * review - 1.5, similarity - 0.05));

/** The exact values of an answer; `more`: pairs of name and value. */
export const numbers = (result, kind, probability, more) =>
  facts([
    ["Similarity", words.similarity(result.similarity)],
    ["Threshold", words.similarity(result.threshold)],
    ["Review threshold", words.similarity(result.review_threshold)],
    [`${kind} probability`, words.exact(probability, result.probability_is_bound)],
    ...more,
  ]);

function details(result, shot, gallery, pictures) {
  const { quality, score } = result.face;
  const near = result.candidates.map((one) => [
    h("span.person-cell", [gallery?.keep_crops && pictures.of({ subject: one.subject }, ""), person(shot, one)]),
    words.similarity(one.similarity),
    words.chance(one.false_alarm_probability, one.probability_is_bound) ?? "unknown",
  ]);
  const parts = words
    .qualities(quality)
    .map(([name, value, fine]) => [name, fine ? value : `${value} – out of bounds`]);
  return folded("Details", [
    !result.outcome.startsWith("rejected") &&
      numbers(result, "False-alarm", result.false_alarm_probability, [
        ["Margin to the next person", words.similarity(result.margin)],
      ]),
    near.length > 0 && table("Nearest people", ["Person", "Similarity", "By chance"], near),
    facts([...parts, ["Quality score", quality.score.toFixed(2)], ["Detection score", score.toFixed(2)]]),
  ]);
}
