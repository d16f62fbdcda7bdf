// The risk curve. It is drawn at its real size, so that its text is as large as the page's. A table on the page has the same
// data: for screen readers the chart is one slider.

import { fill, svg } from "./dom.js";
import { linear, logarithmic, oneIn, ticks } from "./numbers.js";

const DECADES = [0.1, 0.01, 0.001, 0.0001, 0.00001];
const MARGIN = { top: 20, right: 20, bottom: 68, left: 104 };
const MARGIN_NARROW = { ...MARGIN, right: 12, left: 96 };
const NARROW = 480;
const MIN_RATE = 8e-6;

/**
 * `stops`: positions of the handle by falling FPIR, targets of the service with `similarity` and `fnir`. `curve`: from the service. `words(stop)`: text
 * of the handle. `onMove(stop)`: called when the user moves it. Returns the element, `focus()`, and `show(state)` with
 * `{stop, review, now, growth}`: position, review threshold, current threshold, and whether to draw the curve for ten times
 * as many people.
 */
export function riskChart({ curve, stops, words, onMove }) {
  const place = svg("svg.chart", { role: "group", "aria-label": "Risk by similarity, with a movable target" });
  const back = svg("g", { "aria-hidden": "true" });
  const front = svg("g", { "aria-hidden": "true" });
  const handle = svg(
    "g.handle",
    {
      role: "slider",
      tabindex: "0",
      "aria-label": "The risk you accept",
      "aria-orientation": "horizontal",
      "aria-valuemin": "0",
      onKeydown: onKey,
    },
    [
      svg("circle.reach", { r: 22 }),
      svg("circle.knob", { r: 10 }),
      svg("path.grip", { d: "M-3-3-6 0l3 3M3-3 6 0 3 3" }),
    ],
  );
  place.append(back, front, handle);
  const similarities = [...curve, ...stops].map((point) => point.similarity);
  const domain = [Math.min(...similarities), Math.min(1, Math.max(...similarities))];
  let state = null;
  let size = null;

  function lay() {
    const width = place.parentElement?.clientWidth ?? 0;
    if (width < 50 || state === null) return;
    const margin = width < NARROW ? MARGIN_NARROW : MARGIN;
    const height = Math.round(Math.min(440, Math.max(320, width * 0.56)));
    const [left, right, top, bottom] = [margin.left, width - margin.right, margin.top, height - margin.bottom];
    const [x, y] = [linear(domain, [left, right]), logarithmic([1, MIN_RATE], [top, bottom])];
    size = { left, right, top, bottom, x, y };
    place.setAttribute("viewBox", `0 0 ${width} ${height}`);
    place.setAttribute("height", height);
    fill(back, axes(size, domain, width < NARROW));
    draw();
  }

  function draw() {
    if (size === null) return;
    const { x, y, top, bottom, left, right } = size;
    const at = Math.min(state.stop.similarity, domain[1]);
    const from = Math.max(domain[0], Math.min(state.review, at));
    const grown = stops.filter((stop) => stop.grown.threshold <= domain[1]);
    const missed = stops.filter((stop) => stop.fnir !== null && stop.fnir > 0);
    const zone = (kind, a, b) =>
      b > a && svg("rect", { class: `zone ${kind}`, x: x(a), y: bottom + 1, width: x(b) - x(a), height: 8 });
    fill(
      front,
      zone("unknown", domain[0], from),
      zone("uncertain", from, at),
      zone("identified", at, domain[1]),
      svg("path.band", { d: band(curve, x, y, bottom) }),
      state.growth && svg("path.line.grown", { d: line(grown.map((stop) => [x(stop.grown.threshold), y(stop.fpir)])) }),
      svg("path.line.missed", { d: line(missed.map((stop) => [x(stop.similarity), y(stop.fnir)])) }),
      svg("path.line.counted", {
        d: line(curve.filter((p) => !p.extrapolated).map((p) => [x(p.similarity), y(p.fpir)])),
      }),
      svg("path.line.extrapolated", { d: line(beyond(curve).map((p) => [x(p.similarity), y(p.fpir)])) }),
      state.now !== null && state.now <= domain[1] && state.now >= domain[0] && today(x(state.now), top, bottom),
      svg("path.guide", { d: `M${left} ${y(state.stop.fpir)}H${x(at)}V${bottom}` }),
      label(oneIn(state.stop.fpir), x(at), y(state.stop.fpir), right),
    );
    handle.setAttribute("transform", `translate(${x(at)} ${y(state.stop.fpir)})`);
    handle.setAttribute("aria-valuemax", String(stops.length - 1)); // exact targets become stops
    handle.setAttribute("aria-valuenow", String(stops.indexOf(state.stop)));
    handle.setAttribute("aria-valuetext", words(state.stop));
  }

  const move = (stop) => stop !== state.stop && onMove(stop);

  function onKey(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 6, PageUp: -6 };
    const ends = { Home: -stops.length, End: stops.length };
    const step = steps[event.key] ?? ends[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const to = stops.indexOf(state.stop) + step;
    move(stops[Math.max(0, Math.min(stops.length - 1, to))]);
  }

  function follow(event) {
    const box = place.getBoundingClientRect();
    const at = event.clientX - box.left;
    const distance = (stop) => Math.abs(size.x(Math.min(stop.similarity, domain[1])) - at);
    move(stops.reduce((best, stop) => (distance(stop) < distance(best) ? stop : best)));
  }

  place.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || size === null) return;
    place.setPointerCapture(event.pointerId);
    place.classList.add("held");
    handle.focus({ preventScroll: true });
    event.preventDefault();
    follow(event);
  });
  place.addEventListener("pointermove", (event) => place.hasPointerCapture(event.pointerId) && follow(event));
  for (const end of ["pointerup", "pointercancel"]) place.addEventListener(end, () => place.classList.remove("held"));

  const seen = new ResizeObserver(lay);
  return {
    element: place,
    focus: () => handle.focus(),
    show(next) {
      const first = state === null;
      state = next;
      if (first) seen.observe(place.parentElement);
      draw();
    },
  };
}

function axes({ left, right, top, bottom, x, y }, domain, narrow) {
  return [
    DECADES.map((rate) => [
      svg("path.grid", { d: `M${left} ${y(rate)}H${right}` }),
      svg("text.tick", { x: left - 10, y: y(rate) + 4, "text-anchor": "end" }, oneIn(rate)),
    ]),
    svg("text.tick", { x: left - 10, y: top + 4, "text-anchor": "end" }, "always"),
    svg("path.grid", { d: `M${left} ${top}H${right}` }),
    svg("path.axis", { d: `M${left} ${top}V${bottom}H${right}` }),
    ticks(domain, narrow ? 4 : 8).map((t) => [
      svg("path.axis", { d: `M${x(t)} ${bottom + 10}v4` }),
      svg("text.tick", { x: x(t), y: bottom + 30, "text-anchor": "middle" }, t.toFixed(2)),
    ]),
    svg(
      "text.tick",
      { x: narrow ? 0 : left, y: bottom + 56 },
      narrow ? "← more matches" : "← more matches, more errors",
    ),
    svg("text.tick", { x: right, y: bottom + 56, "text-anchor": "end" }, "stricter →"),
  ];
}

const today = (at, top, bottom) => [
  svg("path.today", { d: `M${at} ${top}V${bottom}` }),
  svg("text.tick", { x: at, y: top - 7, "text-anchor": "middle" }, "in use"),
];

/** A label beside the handle, away from the falling curve: above on the right, or below on the left. */
function label(text, x, y, right) {
  const over = x < right - 120;
  const place = over ? { x: x + 18, y: y - 12 } : { x: x - 18, y: y + 28, "text-anchor": "end" };
  return svg("text.told", { ...place }, text);
}

const line = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** The extrapolated part of the curve, from the last counted point. */
function beyond(curve) {
  const first = curve.findIndex((point) => point.extrapolated);
  return first === -1 ? [] : curve.slice(Math.max(0, first - 1));
}

function band(curve, x, y, bottom) {
  const over = curve.map((p) => [x(p.similarity), y(p.high)]);
  const under = curve.map((p) => [x(p.similarity), Math.min(bottom, y(p.low))]).reverse();
  return `${line([...over, ...under])}Z`;
}
