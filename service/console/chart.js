// The risk curve. It is drawn at its real size, so that its text is as large as the page's. The slider below it and a table
// on the page say the same to screen readers.

import { fill, svg } from "./dom.js";
import { linear, logarithmic, oneIn, ticks } from "./numbers.js";

const DECADES = [0.1, 0.01, 0.001, 0.0001, 0.00001];
const MARGIN = { top: 20, right: 20, bottom: 68, left: 104 };
const NARROW = 480;
const MIN_RATE = 8e-6;

/**
 * `stops`: targets of the service with `similarity` and `fnir`, by falling FPIR. `curve`: from the service. Returns the
 * element and `show({stop, review, now})`: the chosen target, its review threshold and the current threshold.
 */
export function riskChart({ curve, stops }) {
  const place = svg("svg.chart", { "aria-hidden": "true" });
  const similarities = [...curve, ...stops].map((point) => point.similarity);
  const domain = [Math.min(...similarities), Math.min(1, Math.max(...similarities))];
  const missed = stops.filter((stop) => stop.fnir !== null && stop.fnir > 0);
  let state = null;

  function draw() {
    const width = place.parentElement?.clientWidth ?? 0;
    if (width < 50 || state === null) return;
    const height = Math.round(Math.min(440, Math.max(320, width * 0.56)));
    const [left, right] = [MARGIN.left, width - MARGIN.right];
    const [top, bottom] = [MARGIN.top, height - MARGIN.bottom];
    const [x, y] = [linear(domain, [left, right]), logarithmic([1, MIN_RATE], [top, bottom])];
    place.setAttribute("viewBox", `0 0 ${width} ${height}`);
    place.setAttribute("height", height);
    const { stop, review, now } = state;
    const at = Math.min(stop.similarity, domain[1]);
    const from = Math.max(domain[0], Math.min(review, at));
    const zone = (kind, a, b) =>
      b > a && svg("rect", { class: `zone ${kind}`, x: x(a), y: bottom + 1, width: x(b) - x(a), height: 8 });
    const rates = (points) => line(points.map((point) => [x(point.similarity), y(point.fpir)]));
    fill(
      place,
      axes({ left, right, top, bottom, x, y }, domain, width < NARROW),
      zone("unknown", domain[0], from),
      zone("uncertain", from, at),
      zone("identified", at, domain[1]),
      svg("path.band", { d: band(curve, x, y, bottom) }),
      svg("path.line.missed", { d: line(missed.map((one) => [x(one.similarity), y(one.fnir)])) }),
      svg("path.line.counted", { d: rates(curve.filter((point) => !point.extrapolated)) }),
      svg("path.line.extrapolated", { d: rates(beyond(curve)) }),
      now <= domain[1] && now >= domain[0] && inUse(x(now), top, bottom),
      svg("path.guide", { d: `M${left} ${y(stop.fpir)}H${x(at)}V${bottom}` }),
      svg("circle.knob", { cx: x(at), cy: y(stop.fpir), r: 8 }),
      label(oneIn(stop.fpir), x(at), y(stop.fpir), right, bottom),
    );
  }

  const seen = new ResizeObserver(draw);
  return {
    element: place,
    show(next) {
      if (state === null) seen.observe(place.parentElement);
      state = next;
      draw();
    },
  };
}

function axes({ left, right, top, bottom, x, y }, domain, narrow) {
  const tick = (props, text) => svg("text.tick", props, text);
  return [
    [[1, "always"], ...DECADES.map((rate) => [rate, oneIn(rate)])].map(([rate, text]) => [
      svg("path.grid", { d: `M${left} ${y(rate)}H${right}` }),
      tick({ x: left - 10, y: y(rate) + 4, "text-anchor": "end" }, text),
    ]),
    svg("path.axis", { d: `M${left} ${top}V${bottom}H${right}` }),
    ticks(domain, narrow ? 4 : 8).map((t) => [
      svg("path.axis", { d: `M${x(t)} ${bottom + 10}v4` }),
      tick({ x: x(t), y: bottom + 30, "text-anchor": "middle" }, t.toFixed(2)),
    ]),
    tick({ x: narrow ? 0 : left, y: bottom + 56 }, narrow ? "← more matches" : "← more matches, more errors"),
    tick({ x: right, y: bottom + 56, "text-anchor": "end" }, "stricter →"),
  ];
}

const inUse = (at, top, bottom) => [
  svg("path.today", { d: `M${at} ${top}V${bottom}` }),
  svg("text.tick", { x: at, y: top - 7, "text-anchor": "middle" }, "in use"),
];

/** A label beside the target, away from the falling curve: above on the right, or below on the left, in the chart. */
function label(text, x, y, right, bottom) {
  const low = { x: x - 18, y: Math.min(y + 46, bottom - 8), "text-anchor": "end" };
  return svg("text.told", x < right - 120 ? { x: x + 18, y: y - 12 } : low, text);
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
