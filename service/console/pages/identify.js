import { call, decoysPath, galleryPath, patiently } from "../api.js";
import { galleries, galleryField, ownRisk, riskField } from "../choices.js";
import { fill, h, icon, svg } from "../dom.js";
import { readingOrder } from "../layout.js";
import { whole } from "../numbers.js";
import { DESK, bodyOf, clearDesk, cropped, measure, open, picker, smaller, stage, thumbnail } from "../photo.js";
import { read, write } from "../store.js";
import { Pictures, keepHint, sides } from "../stored.js";
import { button, empty, heading, linkButton, loading, problemBox, table, waiting } from "../ui.js";
import * as words from "../words.js";

export const title = () => "Identify";

const LANDMARKS = "kith-landmarks";

export function render(params, signal) {
  return h(
    "div",
    { class: "page" },
    heading("Identify", "Find out who is in a photo, and how certain the answer is."),
    loading(async () => {
      const known = await galleries(signal);
      if (known?.length === 0) return noGallery();
      return desk(known, params, signal);
    }, "Loading galleries…"),
  );
}

function noGallery() {
  return empty(
    "gallery",
    "Create a gallery first",
    "A gallery holds the people to recognize, such as a staff, a club or a family. Create one and enroll people.",
    linkButton("Create a gallery", "#/galleries?new=1", { kind: "primary", icon: "plus" }),
  );
}

/** The page with at least one gallery: options, then the photo beside the results. */
function desk(known, params, signal) {
  const shots = [];
  let shown = null;
  const strip = h("div", { class: "strip", role: "group", "aria-label": "Photos" });
  const place = h("div", { class: "answer" });
  const live = h("p", { class: "unseen", role: "status" });
  const galleryOf = (name) => known?.find((one) => one.name === name);
  const risks = h("div", {});
  let strictness;
  const chosen = galleryField(known, () => (strict(), again()), { chosen: params.gallery });
  const strict = () => {
    strictness = riskField(again, { own: ownRisk(galleryOf(chosen.value)), hint: "Wrong matches per stranger." });
    fill(risks, strictness);
    say();
  };
  const summary = h("summary", {});
  const say = () => fill(summary, `${chosen.value}, ${strictness.told.toLowerCase()}`);
  const options = h(
    "details",
    { class: "details options", open: true },
    summary,
    h("div", { class: "choices" }, chosen, risks),
  );
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
    for (const file of files)
      shots.push({
        photo: await open(file, signal),
        state: "waiting",
        results: [],
        corrected: [],
        asks: null,
        problem: null,
        stop: null,
      });
    pick.classList.add("compact");
    if (shots.length === files.length && matchMedia("(width < 52rem)").matches) options.open = false; // room for the answer on the first screen
    show(shots[shots.length - files.length]);
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
    try {
      const options = { top_k: 5, detail: "medium", ...(asked.risk && { risk: asked.risk }) };
      const request = { ...bodyOf(shot.photo.file, options), signal: until };
      const answer = await patiently(
        () => call("POST", `${galleryPath(asked.gallery)}/identify`, request),
        until,
        (seconds) => {
          shot.pause = `The service is busy. Next attempt in ${seconds} s…`;
          refresh(shot);
        },
      );
      shot.results = readingOrder(answer.results);
      shot.found = answer.images?.[0];
      const faces = shot.results.filter((one) => one.face);
      for (const one of faces) one.other = faces.indexOf(answer.results[one.other_face]) + 1; // 0: no other face
      shot.gallery = asked.gallery;
      await measure(
        shot.photo,
        answer.results.filter((one) => one.face).map((one) => one.face),
        until,
      );
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
    const back = () => ((shot.state = "waiting"), show(shot), next());
    if (shot.state === "waiting" || shot.state === "asking") {
      const stop = button("Cancel", () =>
        shot.state === "waiting" ? ((shot.state = "stopped"), show(shot)) : shot.stop.abort(),
      );
      return h(
        "div",
        { class: "columns" },
        bare(shot.photo),
        h(
          "div",
          { class: "card" },
          waiting(shot.pause ?? "Detecting and comparing faces…"),
          h("div", { class: "actions" }, stop),
        ),
      );
    }
    if (shot.state === "stopped")
      return h(
        "div",
        { class: "columns" },
        bare(shot.photo),
        h("div", { class: "card" }, h("p", {}, "Canceled."), button("Try again", back)),
      );
    if (shot.state === "failed") {
      const box = problemBox(shot.problem, words.mayPass(shot.problem) && back);
      const shrink = shot.problem.code === "image_too_large" && shot.photo.drawable;
      const send = button(
        "Send a smaller copy",
        async () => ((shot.photo = await open(await smaller(shot.photo), signal)), back()),
        { kind: "primary" },
      );
      return h(
        "div",
        { class: "columns" },
        bare(shot.photo),
        h("div", { class: "stack" }, box, shrink && h("div", { class: "actions" }, send)),
      );
    }
    return answered(shot, galleryOf(shot.gallery), back);
  }

  const pick = picker(take, { signal });
  fill(place, sample());
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
  return h("div", { class: "stack wide desk" }, options, pick, live, strip, place);
}

/** A result for screen readers: file, number of faces, names. */
const told = ({ photo, results, gallery }) => {
  const seen = results.filter((one) => one.face);
  return [
    `${photo.file.name}.`,
    words.summary(results),
    ...seen.map((one) => `${words.identity(one, gallery).title}.`),
  ].join(" ");
};

function chip(shot, i, current, onClick) {
  const told = {
    waiting: "waiting",
    asking: "in progress",
    stopped: "canceled",
    failed: "failed",
    done: words.summary(shot.results),
  }[shot.state];
  const best =
    shot.state === "done" ? (shot.results.find((one) => one.outcome === "identified") ?? shot.results[0])?.outcome : "";
  return h(
    "button",
    {
      type: "button",
      class: `chip ${best ?? ""}`,
      "aria-current": current ? "true" : null,
      "aria-label": `Photo ${i + 1}, ${shot.photo.file.name}: ${told}`,
      onClick,
    },
    shot.photo.drawable ? h("img", { src: shot.photo.url, alt: "" }) : icon("photo"),
    shot.state === "asking" && h("span", { class: "spinner", "aria-hidden": "true" }),
  );
}

const bare = (photo) =>
  photo.drawable
    ? stage(photo, [], { alt: photo.file.name })
    : h("div", { class: "undrawable empty" }, icon("photo"), h("p", {}, photo.file.name));

/** The photo with its faces, and a card per face. Pointing at one highlights the other. `again` repeats the search. */
function answered(shot, gallery, again) {
  const { photo, results } = shot;
  const seen = results.filter((one) => one.face);
  if (seen.length === 0) {
    const said = words.identity(results[0], shot.gallery, gallery?.subject_count);
    return h(
      "div",
      { class: "columns" },
      bare(photo),
      h("div", { class: "card" }, badge(results[0].outcome), h("h2", {}, said.title), h("p", {}, said.text)),
    );
  }
  const pictures = new Pictures(shot.gallery);
  const cards = seen.map((result, i) =>
    (seen.length > 1 && !KNOWN.includes(result.outcome) && corrections(shot, i).length === 0 ? row : card)(
      result,
      i,
      shot,
      gallery,
      again,
      pictures,
    ),
  );
  const ranked = (outcome) => cards.filter((_, i) => corrections(shot, i).length === 0 && seen[i].outcome === outcome);
  const others = cards.filter((one) => one.classList.contains("face-row"));
  const dots = h("input", { type: "checkbox", checked: read("localStorage", LANDMARKS) === "on" });
  const marks = seen.map((result, i) => ({
    face: result.face,
    outcome: result.outcome,
    label: `Face ${i + 1}: ${words.OUTCOMES[result.outcome].label}, ${words.identity(result, shot.gallery, gallery?.subject_count).title}`,
    name: words.boxLabel(result),
  }));
  const picture = stage(photo, marks, {
    landmarks: dots.checked,
    alt: `${photo.file.name}. ${words.summary(results)}`,
    onChoose: (i) => {
      cards[i].scrollIntoView({
        block: "nearest",
        behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
      });
      cards[i].focus({ preventScroll: true });
    },
    onPoint: (i, on) => cards[i].classList.toggle("pointed", on),
  });
  cards.forEach((one, i) => {
    for (const [name, on] of [
      ["pointerenter", true],
      ["pointerleave", false],
      ["focusin", true],
      ["focusout", false],
    ])
      one.addEventListener(name, () => picture.point(i, on));
  });
  dots.addEventListener("change", () => {
    write("localStorage", LANDMARKS, dots.checked ? "on" : "off");
    picture.showLandmarks(dots.checked);
  });
  return h(
    "div",
    { class: "stack" },
    h("h2", {}, words.summary(results)),
    shot.found?.truncated &&
      h(
        "p",
        { class: "hint" },
        `The photo shows ${whole(shot.found.face_count)} faces. Only the largest are searched for.`,
      ),
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        { class: "beside" },
        picture,
        h("div", { class: "row between" }, picture.zoom(), h("label", { class: "check" }, dots, "Landmarks")),
      ),
      h(
        "div",
        { class: "stack" },
        cards.filter((_, i) => corrections(shot, i).length > 0),
        ranked("identified"),
        ranked("uncertain"),
        others.length > 0
          ? h("section", { class: "card face-rows", "aria-label": "Other faces" }, others)
          : seen.length === 1 && ranked(seen[0].outcome).filter(() => !KNOWN.includes(seen[0].outcome)),
      ),
    ),
  );
}

const KNOWN = ["identified", "uncertain"];

export function badge(outcome) {
  const { label, icon: name } = words.OUTCOMES[outcome];
  return h("span", { class: `outcome ${outcome}` }, icon(name), label);
}

const called = (shot, result, gallery) => words.identity(result, shot.gallery, gallery?.subject_count);
const person = (shot, one) =>
  h(
    "a",
    { href: `#/galleries/${encodeURIComponent(shot.gallery)}/subjects/${encodeURIComponent(one.subject)}` },
    words.called(one),
  );

/** A link to the enrollment of a face, as a new person or as `subject`, "" for one to be chosen. */
function enrollLink(shot, result, label, kind, subject) {
  const link = linkButton(
    label,
    `#/enroll?gallery=${encodeURIComponent(shot.gallery)}${subject === undefined ? "" : `&subject=${encodeURIComponent(subject)}`}`,
    { kind, icon: "enroll" },
  );
  link.classList.add("small");
  link.addEventListener("click", () => Object.assign(DESK, { photo: shot.photo, box: result.face.box }));
  return link;
}

/** The corrections of a face in the gallery that was searched. */
const corrections = (shot, i) => shot.corrected.filter((one) => one.face === i && one.gallery === shot.gallery);

/** “Not Ada”: note that the face is another person, and search again. Each correction can be undone. */
function correction(result, i, shot, again) {
  const faces = shot.results.filter((one) => one.face);
  const turn = () => ((shot.asks = i), again());
  const small = (element) => (element.classList.add("small"), element);
  const noted = corrections(shot, i).map((done) => {
    const undo = button("Undo", async () => {
      await call("DELETE", `${decoysPath(done.gallery, done.subject)}/${done.decoy}`);
      shot.corrected.splice(shot.corrected.indexOf(done), 1);
      turn();
    });
    return h("p", { class: "row" }, `Noted: this is not ${done.name}.`, small(undo));
  });
  if (result.outcome !== "identified" || (faces.length > 1 && !shot.photo.drawable)) return noted; // it cannot be cropped
  const note = button(
    `Not ${words.called(result)}`,
    async () => {
      const others = faces.filter((one) => one !== result).map((one) => one.face);
      const file = others.length ? await cropped(shot.photo, result.face, others) : shot.photo.file;
      const request = bodyOf(file, { face: "largest", allow_low_quality: true }); // it was good enough to be answered
      const made = await call("POST", decoysPath(shot.gallery, result.subject), request);
      shot.corrected.push({
        face: i,
        gallery: shot.gallery,
        subject: result.subject,
        name: words.called(result),
        decoy: made.id,
      });
      turn();
    },
    { kind: "quiet", icon: "close" },
  );
  return [noted, h("div", { class: "actions" }, small(note))];
}

/** A person, or somebody who may be one. */
function card(result, i, shot, gallery, again, pictures) {
  const people = words.peopleToCompare(result);
  const enroll = (...wanted) => enrollLink(shot, result, ...wanted);
  const asks = result.outcome !== "identified" && corrections(shot, i).length > 0;
  return h(
    "article",
    { class: `card face-card ${result.outcome}`, tabindex: "-1", "aria-label": `Face ${i + 1}` },
    h(
      "div",
      { class: "face-head" },
      h("span", { class: "face-number" }, String(i + 1)),
      h(
        "h3",
        { class: "name" },
        asks
          ? "Who is it?"
          : result.outcome === "identified"
            ? person(shot, result)
            : called(shot, result, gallery).title,
      ),
      badge(result.outcome),
    ),
    sides([
      ["This photo", thumbnail(shot.photo, result.face.box, 96)],
      ...(gallery?.keep_crops ? people : []).map((one) => [
        words.called(one),
        pictures.person(one.subject, `Stored picture of ${words.called(one)}`),
      ]),
    ]),
    evidence(result, shot, gallery),
    h(
      "div",
      { class: "actions" },
      asks && [enroll("A new person", "primary"), enroll("Somebody enrolled", "plain", "")],
      !asks && result.outcome === "unknown" && enroll("Enroll this face", "primary"),
      result.outcome === "identified" && enroll("Add this photo", "plain", result.subject),
      result.outcome === "uncertain" &&
        people.map((one) => enroll(`It is ${words.called(one)}: add this photo`, "plain", one.subject)),
      !asks && KNOWN.includes(result.outcome) && enroll("Another person", "quiet"),
    ),
    correction(result, i, shot, again),
    result.outcome === "uncertain" && gallery && !gallery.keep_crops && keepHint(shot.gallery),
    details(result, shot, gallery, pictures),
  );
}

/** A stranger, or a face that was not searched for, among others: one line, which opens. */
function row(result, i, shot, gallery, again, pictures) {
  return h(
    "article",
    { class: `face-row ${result.outcome}`, tabindex: "-1", "aria-label": `Face ${i + 1}` },
    h(
      "details",
      { class: "details" },
      h(
        "summary",
        {},
        h("span", { class: "face-number" }, String(i + 1)),
        thumbnail(shot.photo, result.face.box, 40),
        h("h3", {}, result.outcome === "unknown" ? "A stranger" : called(shot, result, gallery).title),
      ),
      evidence(result, shot, gallery),
      details(result, shot, gallery, pictures),
    ),
    result.outcome === "unknown" &&
      Object.assign(enrollLink(shot, result, "Enroll", "quiet"), { ariaLabel: "Enroll this face" }),
  );
}

/** Why the answer is this one: in words, as a meter, and by what the photo lacks. */
const evidence = (result, shot, gallery) => [
  h("p", {}, called(shot, result, gallery).text),
  result.similarity !== undefined && meter(result),
  result.reasons.length > 0 &&
    h(
      "ul",
      { class: "bullets" },
      result.reasons.map((name) => h("li", {}, words.reason(name, result.face, gallery?.quality_gate, result.other))),
    ),
  quality(result.face),
];

/** A note about low quality or liveness. */
function quality({ quality: { score }, liveness: judged }) {
  const poor = score < 0.55 && `The photo quality is ${words.quality(score)}.`;
  return (poor || judged) && h("p", { class: "hint" }, poor, " ", judged && liveness(judged));
}

function liveness(judged) {
  return {
    live: "Liveness: a live person.",
    not_live: "Liveness: a picture of a person.",
    not_judged: "Liveness: unknown.",
  }[judged.verdict];
}

/** A meter of similarity, threshold and review threshold, with a text for screen readers. */
export function meter({ similarity, threshold, review_threshold: review }) {
  const from = meterStart(similarity, review);
  const at = (value) => `${(Math.max(0, Math.min(1, value) - from) / (1 - from)) * 100}%`;
  const [reached, needed] = words.apart(similarity, threshold);
  const told = `Similarity ${reached}. The threshold is ${needed}, the review threshold ${words.similarity(review)}.`;
  const kind = similarity >= threshold ? "enough" : similarity >= review ? "near" : "far";
  return h(
    "div",
    { class: "meter-block" },
    h(
      "div",
      { class: `meter ${kind}`, role: "img", "aria-label": told },
      h("span", { class: "meter-fill", style: { width: at(similarity) } }),
      review < threshold &&
        h("span", { class: "meter-zone", style: { left: at(review), right: `calc(100% - ${at(threshold)})` } }),
      h("span", { class: "meter-mark", style: { left: at(threshold) } }),
    ),
    h(
      "p",
      { class: "meter-words", "aria-hidden": "true" },
      h("span", {}, "Similarity ", h("strong", {}, reached)),
      h("span", {}, threshold > 1 ? "nothing is enough" : `enough from ${needed}`),
    ),
  );
}

/** Where the scale begins: what matters lies about the threshold, and that is near 1 for some recognizers. */
const meterStart = (similarity, review) => Math.max(-1, Math.min(2.5 * review - 1.5, similarity - 0.05));

function details(result, shot, gallery, pictures) {
  const { quality } = result.face;
  const pairs = result.outcome.startsWith("rejected")
    ? []
    : [
        ["Similarity", words.similarity(result.similarity)],
        ["Threshold", words.similarity(result.threshold)],
        ["Review threshold", words.similarity(result.review_threshold)],
        ["False-alarm probability", words.exact(result.false_alarm_probability, result.probability_is_bound)],
        [
          "Requested risk",
          result.risk &&
            Object.entries(result.risk)
              .filter(([name]) => ["fpir", "fmr", "threshold"].includes(name))
              .map(([name, value]) => `${name.toUpperCase()} ${words.exact(value)}`)[0],
        ],
        [
          "Evidence",
          result.risk &&
            {
              pack: "the model’s calibration",
              gallery: "this gallery’s people",
              both: "the model’s calibration and this gallery’s people",
              explicit: "none (fixed threshold)",
            }[result.risk.source] + (result.risk.extrapolated ? ", extrapolated" : ""),
        ],
        ["Margin to the next person", result.margin !== undefined && words.similarity(result.margin)],
      ].filter(([, value]) => value);
  return h(
    "details",
    { class: "details" },
    h("summary", {}, "Details"),
    pairs.length > 0 && facts(pairs),
    result.candidates.length > 0 &&
      table(
        "Nearest people",
        ["Person", "Similarity", "By chance"],
        result.candidates.map((one) => [
          h(
            "span",
            { class: "person-cell" },
            gallery?.keep_crops && pictures.person(one.subject, ""),
            person(shot, one),
          ),
          words.similarity(one.similarity),
          words.chance(one.false_alarm_probability, one.probability_is_bound) ?? "unknown",
        ]),
      ),
    facts([
      ...words.qualities(quality).map(([name, value, fine]) => [name, fine ? value : `${value} – out of bounds`]),
      ["Quality score", quality.score.toFixed(2)],
      ["Detection score", result.face.score.toFixed(2)],
    ]),
  );
}

export const facts = (pairs) =>
  h(
    "dl",
    { class: "facts" },
    pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );

/** An example as a drawing, without a real face. */
function sample() {
  return h(
    "section",
    { class: "card sample" },
    svg(
      "svg",
      { viewBox: "0 0 240 150", class: "sample-drawing", "aria-hidden": "true" },
      svg("rect", { class: "ground", width: 240, height: 150, rx: 10 }),
      [
        [78, "identified"],
        [166, "unknown"],
      ].map(([x, kind]) => [
        svg("path", { class: "body", d: `M${x - 38} 150c2-34 18-46 38-46s36 12 38 46` }),
        svg("circle", { class: "head", cx: x, cy: 72, r: 26 }),
        svg("rect", { class: `box ${kind}`, x: x - 30, y: 38, width: 60, height: 70, rx: 6 }),
      ]),
    ),
    h(
      "div",
      { class: "stack" },
      h("h2", {}, "Possible answers"),
      h(
        "ul",
        { class: "legend" },
        [
          ["identified", "A person of the gallery, with the probability that a stranger is this similar."],
          ["uncertain", "Similar, but not enough for the chosen risk. A person should decide."],
          ["unknown", "No person of the gallery. You can enroll the face."],
          ["rejected_quality", "Too small, dark or blurred; the answer says which."],
        ].map(([outcome, text]) => h("li", {}, badge(outcome), h("span", {}, text))),
      ),
    ),
  );
}
