// Status of the service: what runs, on what, and how much waits. The page refreshes itself.

import { call } from "../api.js";
import { each, fill, h } from "../dom.js";
import { bytes, counted, duration, whole } from "../numbers.js";
import { watch } from "../reports.js";
import { button, heading, notice, outcome, problemBox, stat, table, waiting } from "../ui.js";

export const title = () => "Health";

export function render(params, signal) {
  const well = h("div");
  const seen = h("div.stack.wide", waiting());
  let told; // an alert is announced once
  const ready = watch(async () => {
    const answer = await call("GET", "/readyz", { signal }).catch((error) => error);
    const text = JSON.stringify(answer.version ?? answer.document);
    if (text !== told && !signal.aborted) fill(well, verdict(answer));
    told = text;
  }, signal);
  const status = watch(
    async () => {
      const { models } = await call("GET", "/v1/models", { signal });
      fill(seen, figures(await call("GET", "/v1/status", { signal }), models));
    },
    signal,
    seen,
  );
  const look = () => Promise.all([ready(), status()]);
  return h("div.page", [
    heading("Health", "Status and capacity of the service. This page refreshes itself.", button("Refresh", look)),
    well,
    status.note,
    seen,
  ]);
}

const verdict = (ready) =>
  ready instanceof Error
    ? problemBox(ready)
    : notice("check", `Kith ${ready.version} is ready. All its dependencies work.`, "well");

function figures({ audit, disk, job_counts: jobs, ...status }, models) {
  const queued = status.queues.reduce((sum, queue) => sum + queue.waiting_count, 0);
  const [lines, said] = audit.lost_count > 0 ? [audit.lost_count, "lost"] : [audit.waiting_count, "waiting"];
  return [
    h("dl.stats.card", [
      stat("Uptime", duration(status.uptime_s), `version ${status.version}`),
      stat("Active requests", whole(status.request_count), `${counted(queued, "face")} in queues`),
      jobs &&
        stat("Jobs", whole((jobs.running ?? 0) + (jobs.queued ?? 0)), `active, ${whole(jobs.failed ?? 0)} failed`),
      disk && stat("Disk", bytes(disk.free_bytes), `free of ${bytes(disk.size_bytes)}`),
      stat("Audit", whole(lines), `lines ${said}`),
    ]),
    h("section.card", [
      h("h2", "Dependencies"),
      each("ul.checks", [...status.checks, status.master_key, status.clock].filter(Boolean), check),
    ]),
    table("Queues", ["Queue", "Waiting", "Time each", "Refused since the start"], status.queues.map(queue)),
    table("Recognizers", ["Recognizer", "Networks"], models.map(recognizer)),
  ];
}

function check({ name, ok, detail, remedy }) {
  const [kind, said] = ok
    ? ["identified", "ready"]
    : name === "master_key"
      ? ["uncertain", "to do"]
      : ["failed", "failed"];
  return h("li", [
    outcome(kind, ok ? "check" : "warning", said),
    h("div", [h("strong", name.replaceAll("_", " ")), detail && h("p", detail), remedy && h("p.hint", remedy)]),
  ]);
}

const queue = ({ network, waiting_count: faces, seconds_per_item: seconds, refused_count: refused }) => [
  network,
  whole(faces),
  seconds > 0 ? `${(seconds * 1000).toFixed(1)} ms` : "",
  whole(refused),
];

const recognizer = ({ display_name: name, model, calibrated, ...networks }) => [
  [
    h("p", { title: networks.recognizer }, `${name} (${model})`),
    calibrated ? outcome("identified", "check", "calibrated") : outcome("uncertain", "question", "not calibrated"),
  ],
  ["detection", "recognition", "liveness"]
    .filter((role) => networks[role])
    .map((role) => {
      const { engine, precision, providers, why } = networks[role];
      const on = providers.map((provider) => provider.replace("ExecutionProvider", "")).join(", ");
      return h("p", { title: why }, `${role}: ${engine}, ${precision}, on ${on}`);
    }),
];
