// Status of the service and its galleries. The page refreshes itself.

import { call, galleryPage, galleryPath } from "../api.js";
import { galleries } from "../choices.js";
import { each, fill, h, icon } from "../dom.js";
import { bytes, counted, duration, whole } from "../numbers.js";
import { redraws, watch } from "../reports.js";
import { button, heading, loading, notice, outcome, problemBox, stat, table, waiting } from "../ui.js";

const MAX_GALLERIES = 200;
const CHECKS = {
  database: "Database",
  devices: "Networks",
  gpu: "GPU",
  audit: "Audit",
  milvus: "Milvus",
  master_key: "Master key",
  clock: "Clock",
};
const DRIFTS = {
  ok: ["as expected", "identified", "check"],
  watch: ["slightly changed", "uncertain", "question"],
  drifted: ["drifted", "failed", "warning"],
  too_few: ["too few matches", "", "question"],
};

export const title = () => "Health";

export function render(params, signal) {
  const now = h("div.stack.wide");
  const well = h("div");
  const tell = redraws(well); // announces an alert once
  const seen = h("div.stack.wide");
  const body = h("div.stack.wide", waiting("Loading the status…"));
  let forbidden = false;
  const status = async () => {
    if (forbidden) return null; // repeated refusals would fill the audit log
    try {
      return await call("GET", "/v1/status", { signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      forbidden = error.status === 401 || error.status === 403;
      return null;
    }
  };
  const look = watch(async () => {
    const ready = await readiness(signal);
    const found = await status();
    tell([ready.version, ready.problem?.document], () => verdict(ready));
    fill(seen, found ? figures(found) : h("p.hint", "A key for all galleries with the scope “read” shows more here."));
    if (now.parentElement === body) return false;
    const list = () => stores(signal);
    fill(body, fill(now, well, seen), loading(list, "Loading galleries…"));
    return false;
  }, signal);
  return h("div.page", [
    heading("Health", "Status and capacity of the service. This page refreshes itself.", button("Refresh", look)),
    body,
  ]);
}

/** Readiness with the version, or the problem. */
async function readiness(signal) {
  try {
    return { ...(await call("GET", "/readyz", { signal })), problem: null };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { problem: error };
  }
}

const verdict = ({ problem, version }) =>
  problem
    ? problemBox(problem)
    : notice(
        "check",
        [h("h2", "The service is ready"), h("p", `Kith ${version} and all its dependencies work.`)],
        "well",
      );

function figures({ audit, disk, job_counts: jobs, ...status }) {
  const waiting = status.queues.reduce((sum, queue) => sum + queue.waiting_count, 0);
  const queued = waiting === 0 ? "no faces in queues" : `${counted(waiting, "face")} in queues`;
  const active = jobs && whole((jobs.running ?? 0) + (jobs.queued ?? 0));
  const [lines, said] = audit.lost_count > 0 ? [audit.lost_count, "lost"] : [audit.waiting_count, "waiting"];
  return [
    h("dl.stats.card", [
      stat("Uptime", duration(status.uptime_s), `version ${status.version}`),
      stat("Active requests", whole(status.request_count), queued),
      jobs && stat("Jobs", active, `active; ${whole(jobs.failed ?? 0)} failed in two weeks`),
      disk && stat("Disk", bytes(disk.free_bytes), `free of ${bytes(disk.size_bytes)}`),
      stat("Audit", whole(lines), `lines ${said}`),
    ]),
    h("div.columns", [
      checks([...status.checks, status.master_key, status.clock].filter(Boolean)),
      queues(status.queues),
    ]),
  ];
}

const checks = (found) =>
  h("section.card", [
    h("h2", "Dependencies"),
    each("ul.checks", found, ({ name, ok, detail, remedy }) => {
      const [kind, said] = ok
        ? ["identified", "ready"]
        : name === "master_key"
          ? ["uncertain", "to do"]
          : ["failed", "failed"];
      return h("li", [
        outcome(kind, ok ? "check" : "warning", said),
        h("div", [h("strong", CHECKS[name] ?? name), detail && h("p", detail), remedy && h("p.hint", remedy)]),
      ]);
    }),
  ]);

const queues = (found) =>
  h("section.card", [
    h("h2", "Queues"),
    each(
      "ul.checks",
      found,
      ({ network, waiting_count: waiting, seconds_per_item: seconds, refused_count: refused }) => {
        const per = seconds > 0 ? `, ${(seconds * 1000).toFixed(1)} ms each` : "";
        return h(
          "li",
          h("div", [
            h("strong", sayNetwork(network)),
            h("p", `${waiting === 0 ? "empty" : `${counted(waiting, "face")} waiting`}${per}`),
            refused > 0 && h("p.hint", `${counted(refused, "request")} refused since the start because of overload.`),
          ]),
        );
      },
    ),
  ]);

/** A label for a network such as "detector/kith-compact". */
function sayNetwork(name) {
  const [role, pack] = name.split("/");
  const does = { detector: "Detection", recognizer: "Recognition", liveness: "Liveness" }[role];
  return does ? `${does} (${pack})` : name;
}

async function stores(signal) {
  const found = await galleries(signal, MAX_GALLERIES);
  if (!found?.length) return null;
  const rows = found.map((gallery) => {
    const drift = h("span.hint", "…");
    about(gallery.name, drift, signal);
    return [
      h("a", { href: galleryPage(gallery.name) }, gallery.name),
      whole(gallery.subject_count),
      whole(gallery.template_count),
      drift,
    ];
  });
  return h("section.stack", [
    h("h2", "Galleries"),
    table("Galleries", ["Gallery", "People", "Photos", "Decisions"], rows),
    found.length >= MAX_GALLERIES && h("p.hint", `The first ${whole(found.length)} galleries. “Galleries” lists all.`),
  ]);
}

/** Load the details of a gallery when its row becomes visible, to limit the number of requests. */
function about(gallery, drift, signal) {
  const seen = new IntersectionObserver(async ([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    try {
      const { drift: found } = await call("GET", galleryPath(gallery), { signal });
      const [said, tone, picture] = DRIFTS[found?.state] ?? DRIFTS.too_few;
      drift.className = tone ? `outcome ${tone}` : "hint";
      fill(drift, tone && icon(picture), said);
      drift.title = found?.detail ?? "";
    } catch (error) {
      if (error.name !== "AbortError") fill(drift, error.message);
    }
  });
  seen.observe(drift);
  signal.addEventListener("abort", () => seen.disconnect());
}
