// Risk of a gallery: the curve, a movable target, and its meaning in words.

import { call, galleryPath } from "../api.js";
import { riskChart } from "../chart.js";
import { fill, h, icon, svg } from "../dom.js";
import {
  beyondCurve,
  counted,
  everySo,
  fpirAt,
  inHundred,
  oneIn,
  similarityAt,
  STOPS,
  when,
  whole,
} from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { read, write } from "../store.js";
import { button, field, loading, table, toast } from "../ui.js";

const MAX_TARGETS = 20;
const MAX_REVIEW_RISK = 0.5;
const LATEST_MOVES = 20;
const SOURCES = {
  pack: "the recognizer's own calibration",
  gallery: "the people of this gallery",
  both: "the recognizer's calibration and the people of this gallery",
};

export const title = ({ gallery }) => `Risk of ${gallery}`;

export function render({ gallery }, signal) {
  const body = h("div", { class: "stack wide" });
  const show = () =>
    fill(
      body,
      loading(() => page(gallery, signal, show), "Loading the curve…"),
    );
  show();
  return h(
    "div",
    { class: "page" },
    galleryHeading(
      gallery,
      "risk",
      "How often a stranger may get the name of an enrolled person, and how many people are missed in return.",
    ),
    body,
  );
}

async function page(gallery, signal, again) {
  const [settings, report] = await Promise.all([
    call("GET", galleryPath(gallery), { signal }),
    asked(gallery, STOPS, signal),
  ]);
  const { curve } = report;
  let now = report.threshold;
  let inUse = settings.risk;
  const own = report.risk.fpir ?? fpirAt(curve, Math.min(1, now));
  if (report.risk.fpir !== undefined) await added(gallery, report, own, signal);
  const stops = stopsOf(report);
  if (stops.length === 0) return outOfReach();
  let chosen = nearest(stops, own);
  let growth = false;
  const detail = { open: false };
  const state = h("div", { class: "stack" });
  const told = h("p", { class: "unseen", role: "status" });
  const chart = riskChart({ curve, stops, words: inWords, onMove: choose });
  const growing = h("input", { type: "checkbox", onChange: () => ((growth = growing.checked), draw()) });
  const figure = h(
    "figure",
    { class: "card plot" },
    h("h2", {}, "Risk by required similarity"),
    legend(),
    h("div", { class: "canvas" }, chart.element),
    h(
      "figcaption",
      { class: "hint" },
      "Drag the target, or move it with the arrow keys. The shaded band is the 95 % interval. The dashed part is extrapolated.",
    ),
    h("label", { class: "check" }, growing, " Show ten times as many people"),
  );

  function choose(stop) {
    chosen = stop;
    draw();
    clearTimeout(choose.timer);
    choose.timer = setTimeout(() => (told.textContent = `${inWords(stop)}.`), 600);
  }

  function draw() {
    chart.show({ stop: chosen, review: review(curve, chosen, settings.review_factor), now, growth });
    fill(state, beyond(), meaning(chosen), use(), changes, detailsOf(chosen, report, exactly, detail));
  }

  async function exactly(times) {
    const fpir = Number((1 / times).toPrecision(3));
    await added(gallery, report, fpir, signal);
    const found = nearest(stopsOf(report), fpir);
    if (!stops.some((stop) => stop.fpir === found.fpir)) {
      stops.push(found);
      stops.sort((a, b) => b.fpir - a.fpir);
    }
    choose(stops.find((stop) => stop.fpir === found.fpir));
    chart.focus();
  }

  function beyond() {
    const often = now > 1 ? null : beyondCurve(curve, now);
    return often && h("p", { class: "notice" }, icon("question"), `In use: ${often}.`);
  }

  function use() {
    const same = inUse.fpir === chosen.fpir;
    return h(
      "div",
      { class: "actions" },
      same
        ? h("p", { class: "outcome identified" }, icon("check"), "In use")
        : button("Use this risk", () => accept({ fpir: chosen.fpir }), { kind: "primary", icon: "check" }),
      !same && h("p", { class: "hint" }, `In use: ${accepted(inUse, now)}.`),
    );
  }

  async function accept(risk, undoing = false) {
    const before = inUse;
    const changed = await call("PATCH", galleryPath(gallery), { json: { risk }, signal });
    const fresh = await call("GET", `${galleryPath(gallery)}/risk`, { signal });
    inUse = changed.risk;
    now = fresh.threshold;
    draw();
    const undo = button("Undo", () => accept(before, true), { kind: "plain" });
    const text = undoing
      ? `${gallery} uses the previous risk: ${accepted(inUse, now)}.`
      : `All searches in ${gallery} now use this risk: ${accepted(inUse, now)}.`;
    fill(changes, h("div", { class: "notice" }, icon("check"), h("div", {}, h("p", {}, text), !undoing && undo)));
    clearTimeout(choose.timer); // do not announce the target over this text
    told.textContent = text;
    (undoing ? chart : undo).focus();
  }

  const changes = h("div", {});
  queueMicrotask(draw);
  return [
    settings.subject_count < 2 && few(settings.subject_count),
    h(
      "div",
      { class: "columns risks" },
      h("div", { class: "stack wide" }, figure, evidence(gallery, report, signal, again)),
      h(
        "div",
        { class: "stack wide" },
        h("section", { class: "card meaning", "aria-label": "What the chosen risk means" }, state, told),
        history(gallery, signal),
      ),
    ),
    asTable(stops),
  ];
}

// Requests

/** GET risk for any number of targets, in requests of twenty. */
async function asked(gallery, targets, signal) {
  const parts = [];
  for (let from = 0; from < targets.length; from += MAX_TARGETS) parts.push(targets.slice(from, from + MAX_TARGETS));
  const answers = await Promise.all(
    parts.map((fpir) => call("GET", `${galleryPath(gallery)}/risk`, { query: { fpir }, signal })),
  );
  return { ...answers[0], targets: answers.flatMap((answer) => answer.targets) };
}

async function added(gallery, report, fpir, signal) {
  if (report.targets.some((target) => target.fpir === fpir)) return;
  report.targets.push(...(await asked(gallery, [fpir], signal)).targets);
}

/** The reachable targets, by falling risk. */
function stopsOf(report) {
  return report.targets
    .filter((target) => target.today.threshold <= 1)
    .map((target) => ({ ...target, similarity: target.today.threshold, fnir: target.today.fnir }))
    .sort((a, b) => b.fpir - a.fpir);
}

const nearest = (stops, fpir) => {
  const distance = (stop) => Math.abs(Math.log(stop.fpir / fpir));
  return stops.reduce((best, stop) => (distance(stop) < distance(best) ? stop : best));
};

/** The review threshold: from this similarity, answers are uncertain instead of unknown. */
function review(curve, stop, factor) {
  const risk = Math.max(stop.fpir, Math.min(MAX_REVIEW_RISK, stop.fpir * factor));
  return Math.min(stop.similarity, similarityAt(curve, risk));
}

// In words

const often = (fpir) => `In ${oneIn(fpir).replace("1 in", "1 of")}`;
const strangers = (fpir) => `${often(fpir)} searches for a stranger, the answer is a wrong name`;
const missed = (fnir) =>
  fnir === null
    ? "the share of missed people is not measured"
    : `${inHundred(fnir)} photos of enrolled people are missed`;
const inWords = (stop) => `${strangers(stop.fpir)}; ${missed(stop.fnir)}`;

function accepted(risk, threshold) {
  const meant = threshold > 1 ? "unreachable" : `similarity ${threshold.toFixed(3)}`;
  if (risk.fpir !== undefined) return `${oneIn(risk.fpir)} searches for strangers, ${meant}`;
  if (risk.fmr !== undefined) return `${oneIn(risk.fmr)} comparisons of two people, ${meant}`;
  return `fixed threshold, ${meant}`;
}

function meaning(stop) {
  const daily = Number(read("localStorage", "kith-strangers") ?? 100);
  const so = h("strong", {}, everySo(stop.fpir, daily));
  const input = h("input", {
    type: "number",
    min: 1,
    max: 1_000_000,
    value: String(daily),
    class: "short",
    "aria-label": "Strangers per day",
    onInput: () => {
      const strangersDaily = Number(input.value);
      if (!(strangersDaily >= 1)) return;
      write("localStorage", "kith-strangers", String(strangersDaily));
      so.textContent = everySo(stop.fpir, strangersDaily);
    },
  });
  return [
    h(
      "div",
      { class: "said" },
      h("p", { class: "figure" }, often(stop.fpir)),
      h("p", {}, "searches for a stranger, the answer is a wrong name."),
    ),
    h("p", { class: "daily" }, "With ", input, " strangers a day: ", so),
    h("hr", {}),
    stop.fnir === null
      ? h("p", {}, "The share of missed people is not measured for this recognizer.")
      : h(
          "div",
          { class: "said with-dots" },
          h(
            "div",
            {},
            h("p", { class: "figure missed" }, inHundred(stop.fnir)),
            h("p", {}, "photos of enrolled people are missed."),
            h(
              "p",
              { class: "hint" },
              `Between ${inHundred(stop.today.fnir_low)} and ${inHundred(stop.today.fnir_high)}, for photos like those enrolled.`,
            ),
          ),
          dots(stop.fnir),
        ),
    stop.today.extrapolated && h("p", { class: "hint" }, "This risk is extrapolated: it is too small to count."),
  ];
}

/** A hundred dots with a filled share. */
function dots(share) {
  const filled = Math.round(share * 100);
  return svg(
    "svg",
    { class: "dots", viewBox: "0 0 100 100", "aria-hidden": "true" },
    Array.from({ length: 100 }, (_, i) =>
      svg("circle", {
        class: i < filled ? "full" : "",
        cx: 5 + 10 * (i % 10),
        cy: 5 + 10 * Math.floor(i / 10),
        r: 3.6,
      }),
    ),
  );
}

function legend() {
  const entry = (kind, text) =>
    h(
      "li",
      {},
      svg(
        "svg",
        { class: `key ${kind}`, viewBox: "0 0 24 10", "aria-hidden": "true" },
        svg("path", { class: `line ${kind}`, d: "M1 5H23" }),
      ),
      text,
    );
  const zone = (kind, text) =>
    h(
      "li",
      {},
      svg(
        "svg",
        { class: "key", viewBox: "0 0 24 10", "aria-hidden": "true" },
        svg("rect", { class: `zone ${kind}`, x: 1, y: 1, width: 22, height: 8 }),
      ),
      text,
    );
  return h(
    "ul",
    { class: "legend" },
    entry("counted", "strangers who get a name"),
    entry("missed", "enrolled people who are missed"),
    zone("identified", "named"),
    zone("unknown", "unknown"),
    zone("uncertain", "uncertain: a person should check"),
  );
}

function detailsOf(stop, report, exactly, detail) {
  const { today, grown } = stop;
  const input = h("input", {
    type: "number",
    min: 2,
    max: 1e9,
    value: String(Math.round(1 / stop.fpir)),
    class: "short",
  });
  const form = h(
    "form",
    {
      class: "inline",
      onSubmit: (event) => (
        event.preventDefault(),
        input.checkValidity() && exactly(Number(input.value)).catch((error) => toast(error.message, "error"))
      ),
    },
    field("One in", input),
    h("button", { type: "submit", class: "button plain" }, "Show"),
  );
  const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  return h(
    "details",
    { open: detail.open, onToggle: (event) => (detail.open = event.target.open) },
    h("summary", {}, "Details"),
    h(
      "dl",
      { class: "pairs" },
      row("FPIR", String(stop.fpir)),
      row(
        "Threshold",
        `${today.threshold.toFixed(4)} (95 %: ${today.low.toFixed(4)} to ${Math.min(1, today.high).toFixed(4)})`,
      ),
      row(
        "FNIR",
        today.fnir === null ? "not measured" : `${today.fnir} (95 %: ${today.fnir_low} to ${today.fnir_high})`,
      ),
      row("People", whole(today.subject_count)),
      row(
        `At ${whole(grown.subject_count)} people`,
        grown.threshold > 1
          ? "unreachable"
          : `${grown.threshold.toFixed(4)}; ${grown.fnir === null ? "" : missed(grown.fnir)}`,
      ),
      row("Evidence", `${report.evidence.source}${today.extrapolated ? ", extrapolated" : ""}`),
    ),
    form,
  );
}

// Below the chart

function evidence(gallery, report, signal, again) {
  const found = report.evidence;
  const derive = async () => {
    await call("POST", `${galleryPath(gallery)}/calibrate`, { signal });
    toast("Computed again from all enrolled people.");
    again();
  };
  return h(
    "section",
    { class: "card basis" },
    h("h2", {}, "Evidence"),
    h(
      "p",
      {},
      `${sentence(SOURCES[found.source])}: ${whole(found.pack_pair_count)} pairs of different people in the calibration`,
      found.pair_count > 0 ? `, and ${whole(found.pair_count)} pairs in this gallery.` : ".",
    ),
    found.duplicate_pair_count >= 1 &&
      h(
        "p",
        {},
        `About ${counted(Math.round(found.duplicate_pair_count), "pair")} of people may be duplicates and are excluded. `,
        h("a", { href: `#/galleries/${encodeURIComponent(gallery)}/hygiene` }, "Show them"),
        ".",
      ),
    report.check && checked(report.check),
    (report.warnings ?? []).map((warning) => h("p", { class: "hint" }, WARNINGS[warning](found))),
    h(
      "p",
      { class: "hint" },
      found.derived_at === null
        ? "Not computed from this gallery yet."
        : `Computed ${when(found.derived_at)}${found.up_to_date ? "" : ". People changed since then: Kith is computing it again"}.`,
    ),
    h("div", { class: "actions" }, button("Compute again", derive)),
  );
}

const WARNINGS = {
  photos_of_one_sitting: () =>
    "The photos of most people look like one sitting’s. The misses above hold for photos like those: add photos of another day.",
  people_unlike_calibration: ({ fmr_over_pack: ratio }) =>
    `People here are taken for each other ${Number(ratio.toPrecision(2))} times as often as those the recognizer was calibrated with: other ages, origins, masks or cameras. The threshold follows the people here; check it with photos of strangers.`,
};
const sentence = (text) => text[0].toUpperCase() + text.slice(1);

function checked(check) {
  if (check.expected < 1) return h("p", {}, "There are too few people for a check.");
  return h(
    "p",
    {},
    `Check: Kith searched for each of ${counted(check.probe_count, "person", "people")} among the others. `,
    `At a risk of ${inHundred(check.fpir)}, about ${whole(check.expected)} get a wrong name; ${whole(check.observed_count)} did. `,
    h("strong", {}, agreement(check)),
  );
}

/** Compare with wide limits: comparisons within a gallery are not independent, so counts vary more than Poisson counts. */
function agreement({ observed_count: observed, expected }) {
  if (observed > 1.5 * expected + 3) return "That is far more: there may be duplicates or relatives.";
  if (observed < expected / 1.5 - 3) return "That is far fewer: the real risk is smaller.";
  return "That agrees.";
}

function history(gallery, signal) {
  const place = h("section", { class: "card moved" }, h("h2", {}, "Threshold history"));
  const content = h("div", {});
  place.append(content);
  const query = { event: "threshold_moved", limit: LATEST_MOVES };
  call("GET", `${galleryPath(gallery)}/audit`, { query, signal }).then(
    ({ data: lines }) =>
      fill(
        content,
        lines.length
          ? moves(lines)
          : h(
              "p",
              { class: "hint" },
              "No changes yet. The threshold changes with the enrolled people, so that the risk stays the same.",
            ),
      ),
    (error) =>
      error.name !== "AbortError" &&
      fill(
        content,
        h("p", { class: "hint" }, error.status === 403 ? "This needs a key with the scope “admin”." : error.message),
      ),
  );
  return place;
}

function moves(lines) {
  const rows = lines.map(({ at, details: { before, after, reason } }) => [
    when(at),
    [before?.threshold, after?.threshold]
      .filter((one) => one !== undefined)
      .map((one) => one.toFixed(4))
      .join(" → "),
    after?.subjects === undefined ? "" : whole(after.subjects),
    reason ?? "",
  ]);
  return h(
    "div",
    { class: "stack short-list" },
    h(
      "p",
      { class: "hint" },
      "The threshold changes with the enrolled people, so that the risk stays the same. Newest first.",
    ),
    table("Threshold history", ["When", "Threshold", "People", "Reason"], rows),
  );
}

function asTable(stops) {
  return h(
    "details",
    { class: "card" },
    h("summary", {}, "Show as a table"),
    table(
      "Thresholds by risk",
      ["Strangers who get a name", "Threshold", "95 %", "Missed", "Ten times the people", ""],
      stops.map(({ fpir, today, grown }) => [
        oneIn(fpir),
        today.threshold.toFixed(4),
        `${today.low.toFixed(4)} to ${Math.min(1, today.high).toFixed(4)}`,
        today.fnir === null ? "not measured" : inHundred(today.fnir),
        grown.threshold > 1 ? "unreachable" : grown.threshold.toFixed(4),
        today.extrapolated ? "extrapolated" : "",
      ]),
    ),
  );
}

const few = (subjects) =>
  h(
    "div",
    { class: "notice" },
    icon("question"),
    h(
      "p",
      {},
      subjects === 0
        ? "No people are enrolled. The curve is for the first person."
        : "One person is enrolled. With more people, strangers reach higher similarities, and the curve moves right.",
    ),
  );

const outOfReach = () =>
  h(
    "div",
    { class: "notice error" },
    icon("warning"),
    h(
      "p",
      {},
      "No threshold reaches these risks with this recognizer and gallery size. Use a stronger pack, or smaller galleries.",
    ),
  );
