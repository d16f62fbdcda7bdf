// Risk of a gallery: the curve, a target on a slider, and its meaning in words. All numbers are the service's.

import { call, galleryPage, galleryPath } from "../api.js";
import { riskChart } from "../chart.js";
import { fill, h, svg } from "../dom.js";
import { counted, everySo, inHundred, oneIn, STOPS, when, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { read, write } from "../store.js";
import { field } from "../forms.js";
import { button, folded, loading, notice, outcome, table, toast } from "../ui.js";
import { capitalized, riskInWords } from "../words.js";

const SOURCES = {
  pack: "the recognizer's own calibration",
  gallery: "the people of this gallery",
  both: "the recognizer's calibration and the people of this gallery",
};

export const title = ({ gallery }) => `Risk of ${gallery}`;

export function render({ gallery }, signal) {
  const body = h("div.stack.wide");
  const show = () => fill(body, loading(page, "Loading the curve…"));
  const page = () => view(gallery, signal, show);
  show();
  return h("div.page", [
    galleryHeading(
      gallery,
      "risk",
      "How often strangers may get a wrong name, and how many people are missed in return.",
    ),
    body,
  ]);
}

async function view(gallery, signal, again) {
  const settings = await call("GET", galleryPath(gallery), { signal });
  let inUse = settings.risk;
  const targets = new Set([...STOPS, ...(inUse.fpir === undefined ? [] : [inUse.fpir])]);
  const query = { fpir: [...targets].sort((a, b) => b - a) };
  const report = await call("GET", `${galleryPath(gallery)}/risk`, { query, signal });
  const stops = stopsOf(report.targets);
  if (stops.length === 0) return outOfReach();
  let now = report.threshold;
  let chosen =
    inUse.fpir === undefined ? nearest(stops, (one) => Math.abs(one.similarity - now)) : ofRisk(stops, inUse.fpir);
  const state = h("div.stack");
  const changes = h("div", { role: "status" });
  const chart = riskChart({ curve: report.curve, stops });
  const slider = h("input", {
    type: "range",
    min: 0,
    max: stops.length - 1,
    value: stops.indexOf(chosen),
    onInput: () => draw(stops[slider.value]),
  });
  const figure = h("figure.card.plot", [
    h("h2", "Risk by required similarity"),
    legend(),
    h("div.canvas", chart.element),
    field("The risk you accept", slider, "To the right: stricter. Nothing changes until you use the risk."),
    h("figcaption.hint", "The shaded band is the 95 % interval. The dashed part is extrapolated."),
  ]);

  function draw(stop) {
    chosen = stop;
    slider.setAttribute("aria-valuetext", inWords(stop));
    // From the threshold of this multiple of the risk on, answers are uncertain instead of unknown.
    const review = ofRisk(stops, stop.fpir * settings.review_factor).similarity;
    chart.show({ stop, review, now });
    fill(state, meaning(stop), use(), changes);
  }

  function use() {
    const accepts = () => accept({ fpir: chosen.fpir });
    if (inUse.fpir === chosen.fpir) return h("div.actions", outcome("identified", "check", "In use"));
    const use = button("Use this risk", accepts, { kind: "primary", icon: "check" });
    return h("div.actions", [use, h("p.hint", `In use: ${accepted(inUse, now)}.`)]);
  }

  async function accept(risk, undoing = false) {
    const before = inUse;
    const changed = await call("PATCH", galleryPath(gallery), { json: { risk }, signal });
    const fresh = await call("GET", `${galleryPath(gallery)}/risk`, { signal });
    inUse = changed.risk;
    now = fresh.threshold;
    draw(chosen);
    const undo = button("Undo", () => accept(before, true));
    const uses = undoing ? `${gallery} uses the previous risk` : `All searches in ${gallery} now use this risk`;
    fill(changes, notice("check", [h("p", `${uses}: ${accepted(inUse, now)}.`), !undoing && undo]));
    (undoing ? slider : undo).focus();
  }

  queueMicrotask(() => draw(chosen));
  return [
    settings.subject_count < 2 && few(settings.subject_count),
    h("div.columns.risks", [
      h("div.stack.wide", [figure, evidence(gallery, report, signal, again)]),
      h("section.card.meaning", { "aria-label": "What the chosen risk means" }, state),
    ]),
    asTable(stops),
  ];
}

/** The reachable targets. */
const stopsOf = (targets) =>
  targets
    .filter(({ today }) => today.threshold <= 1)
    .map((target) => ({ ...target, similarity: target.today.threshold, fnir: target.today.fnir }));

/** The stop of the smallest distance; undefined if there is none. */
const nearest = (stops, distance) => stops.toSorted((one, other) => distance(one) - distance(other))[0];
const ofRisk = (stops, fpir) => nearest(stops, (stop) => Math.abs(Math.log(stop.fpir / fpir)));

// In words

const often = (fpir) => `In ${oneIn(fpir).replace("1 in", "1 of")}`;
const WRONG = "searches for a stranger, the answer is a wrong name";
const missed = (fnir) =>
  fnir === null ? "the share of missed people is not measured" : `${inHundred(fnir)} ${MISSED}`;
const MISSED = "photos of enrolled people are missed";
const inWords = (stop) => `${often(stop.fpir)} ${WRONG}; ${missed(stop.fnir)}`;

function accepted(risk, threshold) {
  const asked = risk.threshold === undefined ? riskInWords(risk) : "fixed threshold";
  return `${asked}, ${threshold > 1 ? "unreachable" : `similarity ${threshold.toFixed(3)}`}`;
}

function meaning({ fpir, fnir, today }) {
  const daily = Number(read("localStorage", "kith-strangers") ?? 100);
  const so = h("strong", everySo(fpir, daily));
  const asked = { type: "number", min: 1, max: 1_000_000, value: String(daily), "aria-label": "Strangers per day" };
  const count = () => {
    if (!(Number(input.value) >= 1)) return;
    write("localStorage", "kith-strangers", String(Number(input.value)));
    so.textContent = everySo(fpir, Number(input.value));
  };
  const input = h("input.short", { ...asked, onInput: count });
  return [
    h("div.said", [h("p.figure", often(fpir)), h("p", `${WRONG}.`)]),
    h("p.daily", ["With ", input, " strangers a day: ", so]),
    h("hr"),
    fnir === null
      ? h("p", "The share of missed people is not measured for this recognizer.")
      : h("div.said", [
          h("p.figure.missed", inHundred(fnir)),
          h("p", `${MISSED}.`),
          h("p.hint", `${inHundred(today.fnir_low)} to ${inHundred(today.fnir_high)}, for photos like those enrolled.`),
        ]),
    today.extrapolated && h("p.hint", "This risk is extrapolated: it is too small to count."),
  ];
}

function legend() {
  const entry = (kind, drawn, text) =>
    h("li", [svg("svg", { class: `key ${kind}`, viewBox: "0 0 24 10", "aria-hidden": "true" }, drawn), text]);
  const line = (kind, text) => entry(kind, svg("path", { class: `line ${kind}`, d: "M1 5H23" }), text);
  const zone = (kind, text) =>
    entry("", svg("rect", { class: `zone ${kind}`, x: 1, y: 1, width: 22, height: 8 }), text);
  return h("ul.legend", [
    line("counted", "strangers who get a name"),
    line("missed", "enrolled people who are missed"),
    zone("identified", "named"),
    zone("unknown", "unknown"),
    zone("uncertain", "uncertain: a person should check"),
  ]);
}

// Below the chart

function evidence(gallery, report, signal, again) {
  const found = report.evidence;
  const derive = async () => {
    await call("POST", `${galleryPath(gallery)}/calibrate`, { signal });
    toast("Computed again from all enrolled people.");
    again();
  };
  return h("section.card.basis", [
    h("h2", "Evidence"),
    h("p", [
      `${capitalized(SOURCES[found.source])}: ${whole(found.pack_pair_count)} pairs of different people in the calibration`,
      found.pair_count > 0 ? `, and ${whole(found.pair_count)} pairs in this gallery.` : ".",
    ]),
    found.duplicate_pair_count >= 1 &&
      h("p", [
        `About ${counted(Math.round(found.duplicate_pair_count), "pair")} of people may be duplicates and are excluded. `,
        h("a", { href: galleryPage(gallery, "/hygiene") }, "Show them"),
        ".",
      ]),
    report.check && checked(report.check),
    (report.warnings ?? []).map((warning) => h("p.hint", WARNINGS[warning](found))),
    h("p.hint", found.derived_at ? `Computed ${when(found.derived_at)}.` : "Not computed from this gallery yet."),
    !found.up_to_date && h("p.hint", "People changed since then: Kith is computing it again."),
    h("p.hint", [
      "The threshold changes with the enrolled people, so that the risk stays the same. ",
      h(
        "a",
        { href: `#/settings/audit?event=threshold_moved&gallery=${encodeURIComponent(gallery)}` },
        "See its changes",
      ),
      ".",
    ]),
    h("div.actions", button("Compute again", derive)),
  ]);
}

const WARNINGS = {
  photos_of_one_sitting: () =>
    "The photos of most people look like one sitting’s. The misses above hold for photos like those: add photos of another day.",
  people_unlike_calibration: ({ fmr_over_pack: ratio }) =>
    `People here are taken for each other ${Number(ratio.toPrecision(2))} times as often as those the recognizer was calibrated with: other ages, origins, masks or cameras. The threshold follows the people here; check it with photos of strangers.`,
};

function checked(check) {
  if (check.expected < 1) return h("p", "There are too few people for a check.");
  return h("p", [
    `Check: Kith searched for each of ${counted(check.probe_count, "person", "people")} among the others. `,
    `At a risk of ${inHundred(check.fpir)}, about ${whole(check.expected)} get a wrong name; ${whole(check.observed_count)} did. `,
    h("strong", agreement(check)),
  ]);
}

/** Compare with wide limits: comparisons within a gallery are not independent, so counts vary more than Poisson counts. */
function agreement({ observed_count: observed, expected }) {
  if (observed > 1.5 * expected + 3) return "That is far more: there may be duplicates or relatives.";
  if (observed < expected / 1.5 - 3) return "That is far fewer: the real risk is smaller.";
  return "That agrees.";
}

function asTable(stops) {
  const rows = table(
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
  );
  return folded("Show as a table", rows, { class: "details card" });
}

const few = (subjects) =>
  notice(
    "question",
    subjects === 0 ? "The curve is for the first person." : "With more people, the curve moves right.",
  );

const outOfReach = () =>
  notice(
    "warning",
    "This recognizer reaches no risk in this gallery. Use a stronger pack, or smaller galleries.",
    "error",
  );
