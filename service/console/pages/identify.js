import { call, galleryPath, patiently } from "../api.js";
import { galleries, galleryField, ownRisk, riskField } from "../choices.js";
import { fill, h, icon, svg } from "../dom.js";
import { DESK, bodyOf, clearDesk, measure, open, picker, smaller, stage, thumbnail } from "../photo.js";
import { read, write } from "../store.js";
import { button, empty, heading, linkButton, loading, problemBox, table, waiting } from "../ui.js";
import * as words from "../words.js";

export const title = () => "Identify";

const LANDMARKS = "kith-landmarks";

export function render(params, signal) {
  return h(
    "div",
    { class: "page" },
    heading("Identify", "Who is in this photo, and how sure that is."),
    loading(async () => {
      const known = await galleries(signal);
      if (known?.length === 0) return noGallery();
      return desk(known, params, signal);
    }, "Looking for your galleries…"),
  );
}

function noGallery() {
  return empty(
    "gallery",
    "First, a gallery",
    "A gallery holds the people that photos are compared with: a staff, a club, a family. Make one, enroll somebody, and come back.",
    linkButton("Make a gallery", "#/galleries?new=1", { kind: "primary", icon: "plus" }),
  );
}

/** The page once there is somebody to ask: what is chosen above, the photo beside what it says below. */
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
    strictness = riskField(again, { own: ownRisk(galleryOf(chosen.value)), hint: "How many strangers are taken for somebody." });
    fill(risks, strictness);
  };
  strict();

  function again() {
    for (const shot of shots) {
      if (shot.state === "asking") shot.stop.abort();
      shot.state = "waiting";
    }
    if (shown) show(shown);
    next();
  }

  async function take(files) {
    for (const file of files) shots.push({ photo: await open(file, signal), state: "waiting", results: [], problem: null, stop: null });
    pick.classList.add("compact");
    show(shots[shots.length - files.length]);
    next();
  }

  /** One photo after another: the service is others', too. */
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
      const options = { top_k: 5, ...(asked.risk && { risk: asked.risk }) };
      const request = { ...bodyOf(shot.photo.file, options), signal: until };
      const answer = await patiently(
        () => call("POST", `${galleryPath(asked.gallery)}/identify`, request),
        until,
        (seconds) => {
          shot.pause = `Others are being served. Trying again in ${seconds} s…`;
          refresh(shot);
        },
      );
      shot.results = answer.results;
      shot.gallery = asked.gallery;
      await measure(shot.photo, answer.results.filter((one) => one.face).map((one) => one.face), until);
      if (shot.state === "asking") shot.state = "done";
    } catch (error) {
      if (signal.aborted || shot.stop !== stop) return; // gone, or asked anew
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
    strip.children[at]?.focus(); // the same photo's, made anew
    if (shot !== shown) return;
    fill(place, view(shot));
    if (shot.state === "done") live.textContent = told(shot);
  }

  function view(shot) {
    const back = () => ((shot.state = "waiting"), show(shot), next());
    if (shot.state === "waiting" || shot.state === "asking") {
      const stop = button("Cancel", () => (shot.state === "waiting" ? ((shot.state = "stopped"), show(shot)) : shot.stop.abort()));
      return h("div", { class: "columns" }, bare(shot.photo), h("div", { class: "card" }, waiting(shot.pause ?? "Looking for faces, and comparing them…"), h("div", { class: "actions" }, stop)));
    }
    if (shot.state === "stopped")
      return h("div", { class: "columns" }, bare(shot.photo), h("div", { class: "card" }, h("p", {}, "Stopped before there was an answer."), button("Ask again", back)));
    if (shot.state === "failed") {
      const box = problemBox(shot.problem, words.mayPass(shot.problem) && back);
      const shrink = shot.problem.code === "image_too_large" && shot.photo.drawable;
      const send = button("Send a smaller copy", async () => ((shot.photo = await open(await smaller(shot.photo), signal)), back()), { kind: "primary" });
      return h("div", { class: "columns" }, bare(shot.photo), h("div", { class: "stack" }, box, shrink && h("div", { class: "actions" }, send)));
    }
    return answered(shot, galleryOf(shot.gallery));
  }

  const pick = picker(take, { signal });
  fill(place, sample());
  // Who goes to enroll one of the faces comes back to the photos, and sees what has become of it.
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
  return h("div", { class: "stack wide" }, h("div", { class: "choices" }, chosen, risks), pick, live, strip, place);
}

/** An answer for those who listen: of which photo, how many, and who. */
const told = ({ photo, results, gallery }) => {
  const seen = results.filter((one) => one.face);
  return [`${photo.file.name}.`, words.summary(results), ...seen.map((one) => `${words.identity(one, gallery).title}.`)].join(" ");
};

function chip(shot, i, current, onClick) {
  const told = { waiting: "waiting", asking: "being looked at", stopped: "stopped", failed: "failed", done: words.summary(shot.results) }[shot.state];
  const best = shot.state === "done" ? (shot.results.find((one) => one.outcome === "identified") ?? shot.results[0])?.outcome : "";
  return h(
    "button",
    { type: "button", class: `chip ${best ?? ""}`, "aria-current": current ? "true" : null, "aria-label": `Photo ${i + 1}, ${shot.photo.file.name}: ${told}`, onClick },
    shot.photo.drawable ? h("img", { src: shot.photo.url, alt: "" }) : icon("photo"),
    shot.state === "asking" && h("span", { class: "spinner", "aria-hidden": "true" }),
  );
}

const bare = (photo) =>
  photo.drawable ? stage(photo, [], { alt: photo.file.name }) : h("div", { class: "undrawable empty" }, icon("photo"), h("p", {}, photo.file.name));

/** The photo with its faces, and a card for each; what is pointed at in one is marked in the other. */
function answered(shot, gallery) {
  const { photo, results } = shot;
  const seen = results.filter((one) => one.face);
  if (seen.length === 0) {
    const said = words.identity(results[0], shot.gallery, gallery?.subjects);
    return h("div", { class: "columns" }, bare(photo), h("div", { class: "card" }, badge(results[0].outcome), h("h2", {}, said.title), h("p", {}, said.text)));
  }
  const cards = seen.map((result, i) => card(result, i, shot, gallery));
  const dots = h("input", { type: "checkbox", checked: read("localStorage", LANDMARKS) === "on" });
  const marks = seen.map((result, i) => ({
    face: result.face,
    outcome: result.outcome,
    label: `Face ${i + 1}: ${words.OUTCOMES[result.outcome].label}, ${words.identity(result, shot.gallery, gallery?.subjects).title}`,
  }));
  const picture = stage(photo, marks, {
    landmarks: dots.checked,
    alt: `${photo.file.name}. ${words.summary(results)}`,
    onChoose: (i) => {
      cards[i].scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      cards[i].focus({ preventScroll: true });
    },
    onPoint: (i, on) => cards[i].classList.toggle("pointed", on),
  });
  cards.forEach((one, i) => {
    for (const [name, on] of [["pointerenter", true], ["pointerleave", false], ["focusin", true], ["focusout", false]])
      one.addEventListener(name, () => picture.point(i, on));
  });
  dots.addEventListener("change", () => {
    write("localStorage", LANDMARKS, dots.checked ? "on" : "off");
    picture.showLandmarks(dots.checked);
  });
  return h(
    "div",
    { class: "columns" },
    h("div", { class: "beside" }, picture, h("label", { class: "check" }, dots, "Show eyes, nose and mouth as Kith found them")),
    h("div", { class: "stack" }, h("h2", {}, words.summary(results)), cards),
  );
}

export function badge(outcome) {
  const { label, icon: name } = words.OUTCOMES[outcome];
  return h("span", { class: `outcome ${outcome}` }, icon(name), label);
}

function card(result, i, shot, gallery) {
  const said = words.identity(result, shot.gallery, gallery?.subjects);
  const person = (one) => h("a", { href: `#/galleries/${encodeURIComponent(shot.gallery)}/subjects/${encodeURIComponent(one.subject)}` }, words.called(one));
  const keep = () => Object.assign(DESK, { photo: shot.photo, box: result.face.box });
  const enroll = (label, kind, subject) => {
    const link = linkButton(label, `#/enroll?gallery=${encodeURIComponent(shot.gallery)}${subject ? `&subject=${encodeURIComponent(subject)}` : ""}`, { kind, icon: "enroll" });
    link.classList.add("small");
    link.addEventListener("click", keep);
    return link;
  };
  const nearest = result.candidates[0];
  const refused = result.outcome.startsWith("rejected");
  return h(
    "article",
    { class: `card face-card ${result.outcome}`, tabindex: "-1", "aria-label": `Face ${i + 1}` },
    h(
      "div",
      { class: "face-head" },
      h("div", { class: "thumb-holder" }, thumbnail(shot.photo, result.face.box), h("span", { class: "face-number" }, String(i + 1))),
      h("div", {}, badge(result.outcome), h("h3", { class: "name" }, result.outcome === "identified" ? person(result) : said.title)),
    ),
    h("p", {}, said.text),
    result.similarity !== undefined && meter(result),
    result.reasons.length > 0 && h("ul", { class: "bullets" }, result.reasons.map((name) => h("li", {}, words.reason(name, result.face, gallery?.quality_gate)))),
    quality(result.face),
    h(
      "div",
      { class: "actions" },
      result.outcome === "unknown" && enroll("Enroll this face", "primary"),
      result.outcome === "identified" && enroll("Right: add this photo", "plain", result.subject),
      result.outcome === "uncertain" && nearest && enroll(`It is ${words.called(nearest)}: add this photo`, "plain", nearest.subject),
      ["identified", "uncertain"].includes(result.outcome) && enroll("Somebody else", "quiet"),
    ),
    details(result, person, refused),
  );
}

/** A word on the photo, where it may be why. */
function quality({ quality: { score }, liveness: judged }) {
  const poor = score < 0.55 && `For recognition this is a ${words.quality(score)} photo of a face.`;
  return (poor || judged) && h("p", { class: "hint" }, poor, " ", judged && liveness(judged));
}

function liveness(judged) {
  return { live: "It was taken for a person before the camera.", not_live: "It was taken for a picture of a person.", not_judged: "Whether a person stood there could not be told." }[judged.verdict];
}

/** The similarity between what is needed and what is worth a look; a number is said, not only drawn. */
export function meter({ similarity, threshold, review_threshold: review }) {
  const from = meterStart(similarity, review);
  const at = (value) => `${(Math.max(0, Math.min(1, value) - from) / (1 - from)) * 100}%`;
  const [reached, needed] = words.apart(similarity, threshold);
  const told = `Similarity ${reached} of 1. ${needed} is needed to be sure, ${words.similarity(review)} to be worth a look.`;
  const kind = similarity >= threshold ? "enough" : similarity >= review ? "near" : "far";
  return h(
    "div",
    { class: "meter-block" },
    h(
      "div",
      { class: `meter ${kind}`, role: "img", "aria-label": told },
      h("span", { class: "meter-fill", style: { width: at(similarity) } }),
      review < threshold && h("span", { class: "meter-zone", style: { left: at(review), right: `calc(100% - ${at(threshold)})` } }),
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

function details(result, person, refused) {
  const { quality } = result.face;
  const pairs = refused
    ? []
    : [
        ["Similarity", words.similarity(result.similarity)],
        ["Threshold", words.similarity(result.threshold)],
        ["Review threshold", words.similarity(result.review_threshold)],
        ["False-alarm probability", words.exact(result.false_alarm_probability)],
        ["Risk asked for", result.risk && Object.entries(result.risk).filter(([name]) => ["fpir", "fmr", "threshold"].includes(name)).map(([name, value]) => `${name.toUpperCase()} ${words.exact(value)}`)[0]],
        ["Evidence", result.risk && { pack: "the model’s calibration", gallery: "this gallery’s people", both: "the model’s calibration and this gallery’s people", explicit: "none: a fixed threshold" }[result.risk.source] + (result.risk.extrapolated ? ", extended beyond what could be counted" : "")],
        ["Ahead of the next by", result.margin !== undefined && words.similarity(result.margin)],
      ].filter(([, value]) => value);
  return h(
    "details",
    { class: "details" },
    h("summary", {}, "Details"),
    pairs.length > 0 && facts(pairs),
    result.candidates.length > 0 &&
      table(
        "Who was nearest",
        ["Nearest", "Similarity", "By chance"],
        result.candidates.map((one) => [person(one), words.similarity(one.similarity), words.chance(one.false_alarm_probability) ?? "not known"]),
      ),
    facts([...words.qualities(quality).map(([name, value, fine]) => [name, fine ? value : `${value} – out of bounds`]), ["Quality score", quality.score.toFixed(2)], ["Sure that it is a face", result.face.score.toFixed(2)]]),
  );
}

export const facts = (pairs) => h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

/** What will be here: a drawing, so that nobody's face is needed to say it. */
function sample() {
  return h(
    "section",
    { class: "card sample" },
    svg(
      "svg",
      { viewBox: "0 0 240 150", class: "sample-drawing", "aria-hidden": "true" },
      svg("rect", { class: "ground", width: 240, height: 150, rx: 10 }),
      [[78, "identified"], [166, "unknown"]].map(([x, kind]) => [
        svg("path", { class: "body", d: `M${x - 38} 150c2-34 18-46 38-46s36 12 38 46` }),
        svg("circle", { class: "head", cx: x, cy: 72, r: 26 }),
        svg("rect", { class: `box ${kind}`, x: x - 30, y: 38, width: 60, height: 70, rx: 6 }),
      ]),
    ),
    h(
      "div",
      { class: "stack" },
      h("h2", {}, "What you will see"),
      h("ul", { class: "legend" }, [
        ["identified", "Somebody of the gallery, and how seldom a stranger looks so much alike."],
        ["uncertain", "Alike, but not enough for the risk chosen: for a person to decide."],
        ["unknown", "Nobody of the gallery. You can enroll the face."],
        ["rejected_quality", "Too small, dark or blurred; it says which."],
      ].map(([outcome, text]) => h("li", {}, badge(outcome), h("span", {}, text)))),
    ),
  );
}
