// Risk of a gallery: the curve, a movable target, and its meaning in words. All numbers are the service's.

import { call, galleryPage, galleryPath } from "../api.js";
import { riskChart } from "../chart.js";
import { fill, h, svg } from "../dom.js";
import { counted, everySo, inHundred, oneIn, STOPS, when, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { read, write } from "../store.js";
import { button, field, loading, notice, outcome, table, ticked, toast } from "../ui.js";

const MAX_TARGETS = 20;
const LATEST_MOVES = 20;
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
      "How often a stranger may get the name of an enrolled person, and how many people are missed in return.",
    ),
    body,
  ]);
}

async function view(gallery, signal, again) {
  const [settings, report] = await Promise.all([
    call("GET", galleryPath(gallery), { signal }),
    asked(gallery, STOPS, signal),
  ]);
  const { curve } = report;
  const stops = stopsOf(report.targets);
  let now = report.threshold;
  let inUse = settings.risk;
  let chosen =
    inUse.fpir === undefined ? nearest(stops, (one) => Math.abs(one.similarity - now)) : await stop(inUse.fpir);
  if (chosen === undefined) return outOfReach();
  let growth = false;
  const detail = { open: false };
  const state = h("div.stack");
  const told = h("p.unseen", { role: "status" });
  const chart = riskChart({ curve, stops, words: inWords, onMove: choose });
  const growing = h("input", { type: "checkbox", onChange: () => ((growth = growing.checked), draw()) });
  const figure = h("figure.card.plot", [
    h("h2", "Risk by required similarity"),
    legend(),
    h("div.canvas", chart.element),
    h(
      "figcaption.hint",
      "Drag the target, or move it with the arrow keys. The shaded band is the 95 % interval. The dashed part is extrapolated.",
    ),
    ticked(growing, "Show ten times as many people"),
  ]);

  /** The stop of a risk, which becomes one if it is reachable; else the nearest. */
  async function stop(fpir) {
    if (!stops.some((one) => one.fpir === fpir)) {
      stops.push(...stopsOf((await asked(gallery, [fpir], signal)).targets));
      stops.sort((a, b) => b.fpir - a.fpir);
    }
    return ofRisk(stops, fpir);
  }

  function choose(stop) {
    chosen = stop;
    draw();
    clearTimeout(choose.timer);
    choose.timer = setTimeout(() => (told.textContent = `${inWords(stop)}.`), 600);
  }

  function draw() {
    // From the threshold of this multiple of the risk on, answers are uncertain instead of unknown.
    const review = ofRisk(stops, chosen.fpir * settings.review_factor).similarity;
    chart.show({ stop: chosen, review, now, growth });
    fill(state, beyond(), meaning(chosen), use(), changes, detailsOf(chosen, report, exactly, detail));
  }

  async function exactly(times) {
    choose(await stop(Number((1 / times).toPrecision(3))));
    chart.focus();
  }

  function beyond() {
    const larger = now < curve[0].similarity;
    if (now > 1 || (!larger && now <= curve.at(-1).similarity)) return null;
    return notice("question", `In use: a ${larger ? "larger" : "smaller"} risk than the curve shows.`);
  }

  function use() {
    const accepts = () => accept({ fpir: chosen.fpir });
    return h(
      "div.actions",
      inUse.fpir === chosen.fpir
        ? outcome("identified", "check", "In use")
        : [
            button("Use this risk", accepts, { kind: "primary", icon: "check" }),
            h("p.hint", `In use: ${accepted(inUse, now)}.`),
          ],
    );
  }

  async function accept(risk, undoing = false) {
    const before = inUse;
    const changed = await call("PATCH", galleryPath(gallery), { json: { risk }, signal });
    const fresh = await call("GET", `${galleryPath(gallery)}/risk`, { signal });
    inUse = changed.risk;
    now = fresh.threshold;
    draw();
    const undo = button("Undo", () => accept(before, true));
    const uses = undoing ? `${gallery} uses the previous risk` : `All searches in ${gallery} now use this risk`;
    const text = `${uses}: ${accepted(inUse, now)}.`;
    fill(changes, notice("check", [h("p", text), !undoing && undo]));
    clearTimeout(choose.timer); // do not announce the target over this text
    told.textContent = text;
    (undoing ? chart : undo).focus();
  }

  const changes = h("div");
  queueMicrotask(draw);
  return [
    settings.subject_count < 2 && few(settings.subject_count),
    h("div.columns.risks", [
      h("div.stack.wide", [figure, evidence(gallery, report, signal, again)]),
      h("div.stack.wide", [
        h("section.card.meaning", { "aria-label": "What the chosen risk means" }, [state, told]),
        history(gallery, signal),
      ]),
    ]),
    asTable(stops),
  ];
}

/** GET risk for any number of targets, in requests of twenty. */
async function asked(gallery, targets, signal) {
  const ask = (from) => {
    const query = { fpir: targets.slice(from, from + MAX_TARGETS) };
    return call("GET", `${galleryPath(gallery)}/risk`, { query, signal });
  };
  const parts = Math.ceil(targets.length / MAX_TARGETS);
  const answers = await Promise.all(Array.from({ length: parts }, (_, i) => ask(i * MAX_TARGETS)));
  return { ...answers[0], targets: answers.flatMap((answer) => answer.targets) };
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
  const meant = threshold > 1 ? "unreachable" : `similarity ${threshold.toFixed(3)}`;
  if (risk.fpir !== undefined) return `${oneIn(risk.fpir)} searches for strangers, ${meant}`;
  if (risk.fmr !== undefined) return `${oneIn(risk.fmr)} comparisons of two people, ${meant}`;
  return `fixed threshold, ${meant}`;
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
      : h("div.said.with-dots", [
          h("div", [
            h("p.figure.missed", inHundred(fnir)),
            h("p", `${MISSED}.`),
            h(
              "p.hint",
              `Between ${inHundred(today.fnir_low)} and ${inHundred(today.fnir_high)}, for photos like those enrolled.`,
            ),
          ]),
          dots(fnir),
        ]),
    today.extrapolated && h("p.hint", "This risk is extrapolated: it is too small to count."),
  ];
}

/** A hundred dots with a filled share. */
function dots(share) {
  const filled = Math.round(share * 100);
  const dot = (_, i) =>
    svg("circle", { class: i < filled ? "full" : "", cx: 5 + 10 * (i % 10), cy: 5 + 10 * Math.floor(i / 10), r: 3.6 });
  return svg("svg.dots", { viewBox: "0 0 100 100", "aria-hidden": "true" }, Array.from({ length: 100 }, dot));
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

function detailsOf({ fpir, today, grown }, report, exactly, detail) {
  const input = h("input.short", { type: "number", min: 2, max: 1e9, value: String(Math.round(1 / fpir)) });
  const submit = (event) => {
    event.preventDefault();
    if (input.checkValidity()) exactly(Number(input.value)).catch((error) => toast(error.message, "error"));
  };
  const row = (name, value) => [h("dt", name), h("dd", value)];
  const digits = (value) => Math.min(1, value).toFixed(4);
  const more = grown.fnir === null ? "" : missed(grown.fnir);
  const { fnir } = today;
  return h("details", { open: detail.open, onToggle: (event) => (detail.open = event.target.open) }, [
    h("summary", "Details"),
    h("dl.pairs", [
      row("FPIR", String(fpir)),
      row("Threshold", `${digits(today.threshold)} (95 %: ${digits(today.low)} to ${digits(today.high)})`),
      row("FNIR", fnir === null ? "not measured" : `${fnir} (95 %: ${today.fnir_low} to ${today.fnir_high})`),
      row("People", whole(today.subject_count)),
      row(
        `At ${whole(grown.subject_count)} people`,
        grown.threshold > 1 ? "unreachable" : `${digits(grown.threshold)}; ${more}`,
      ),
      row("Evidence", `${report.evidence.source}${today.extrapolated ? ", extrapolated" : ""}`),
    ]),
    h("form.inline", { onSubmit: submit }, [
      field("One in", input),
      h("button.button.plain", { type: "submit" }, "Show"),
    ]),
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
      `${sentence(SOURCES[found.source])}: ${whole(found.pack_pair_count)} pairs of different people in the calibration`,
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
    h(
      "p.hint",
      found.derived_at === null
        ? "Not computed from this gallery yet."
        : `Computed ${when(found.derived_at)}${found.up_to_date ? "" : ". People changed since then: Kith is computing it again"}.`,
    ),
    h("div.actions", button("Compute again", derive)),
  ]);
}

const WARNINGS = {
  photos_of_one_sitting: () =>
    "The photos of most people look like one sitting’s. The misses above hold for photos like those: add photos of another day.",
  people_unlike_calibration: ({ fmr_over_pack: ratio }) =>
    `People here are taken for each other ${Number(ratio.toPrecision(2))} times as often as those the recognizer was calibrated with: other ages, origins, masks or cameras. The threshold follows the people here; check it with photos of strangers.`,
};
const sentence = (text) => text[0].toUpperCase() + text.slice(1);

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

function history(gallery, signal) {
  const query = { event: "threshold_moved", limit: LATEST_MOVES };
  const latest = async () => {
    const { data } = await call("GET", `${galleryPath(gallery)}/audit`, { query, signal });
    if (data.length > 0) return moves(data);
    return h(
      "p.hint",
      "No changes yet. The threshold changes with the enrolled people, so that the risk stays the same.",
    );
  };
  const refused = (error) => {
    if (error.status !== 403) throw error;
    return h("p.hint", "This needs a key with the scope “admin”.");
  };
  return h("section.card.moved", [h("h2", "Threshold history"), loading(() => latest().catch(refused))]);
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
  return h("div.stack.short-list", [
    h("p.hint", "The threshold changes with the enrolled people, so that the risk stays the same. Newest first."),
    table("Threshold history", ["When", "Threshold", "People", "Reason"], rows),
  ]);
}

function asTable(stops) {
  return h("details.card", [
    h("summary", "Show as a table"),
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
  ]);
}

const few = (subjects) =>
  notice(
    "question",
    subjects === 0
      ? "No people are enrolled. The curve is for the first person."
      : "One person is enrolled. With more people, strangers reach higher similarities, and the curve moves right.",
  );

const outOfReach = () =>
  notice(
    "warning",
    "No threshold reaches these risks with this recognizer and gallery size. Use a stronger pack, or smaller galleries.",
    "error",
  );
