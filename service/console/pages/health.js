// Status of the service and its galleries. The page refreshes itself.

import { all, call, galleryPath } from "../api.js";
import { fill, h, icon } from "../dom.js";
import { bytes, counted, duration, whole } from "../numbers.js";
import { watch } from "../reports.js";
import { button, heading, loading, problemBox, stat, table } from "../ui.js";

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
  const now = h("div", { class: "stack wide" });
  const well = h("div", {});
  const seen = h("div", { class: "stack wide" });
  let told = null;
  const body = h(
    "div",
    { class: "stack wide" },
    loading(() => new Promise(() => {}), "Loading the status…"),
  );
  let forbidden = false;
  const look = watch(async () => {
    const ready = await readiness(signal);
    // Repeated refusals would fill the audit log.
    const status = forbidden
      ? null
      : await allowed(
          () => call("GET", "/v1/status", { signal }),
          ({ status: refused }) => (forbidden = refused === 401 || refused === 403),
        );
    const said = JSON.stringify([ready.version, ready.problem?.document]);
    if (said !== told) fill(well, verdict(ready)); // announce an alert once
    told = said;
    fill(seen, status === null ? unseen() : figures(status));
    if (now.parentElement !== body) {
      fill(now, well, seen);
      fill(
        body,
        now,
        loading(() => stores(signal), "Loading galleries…"),
      );
    }
    return false;
  }, signal);
  return h(
    "div",
    { class: "page" },
    heading("Health", "Status and capacity of the service. This page refreshes itself.", button("Refresh", look)),
    body,
  );
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

/** The result of `ask`; null if it fails or the key lacks the scope. */
async function allowed(ask, onRefused = () => {}) {
  try {
    return await ask();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    onRefused(error);
    return null;
  }
}

const verdict = ({ problem, version }) =>
  problem === null
    ? h(
        "section",
        { class: "notice well" },
        icon("check"),
        h("div", {}, h("h2", {}, "The service is ready"), h("p", {}, `Kith ${version} and all its dependencies work.`)),
      )
    : problemBox(problem);

const unseen = () => h("p", { class: "hint" }, "A key for all galleries with the scope “read” shows more here.");

function figures(status) {
  const { audit, disk, job_counts: jobs } = status;
  const waiting = status.queues.reduce((sum, queue) => sum + queue.waiting_count, 0);
  return [
    h(
      "dl",
      { class: "stats card" },
      stat("Uptime", duration(status.uptime_s), `version ${status.version}`),
      stat(
        "Active requests",
        whole(status.request_count),
        waiting === 0 ? "no faces in queues" : `${counted(waiting, "face")} in queues`,
      ),
      jobs &&
        stat(
          "Jobs",
          whole((jobs.running ?? 0) + (jobs.queued ?? 0)),
          `active; ${whole(jobs.failed ?? 0)} failed in two weeks`,
        ),
      disk && stat("Disk", bytes(disk.free_bytes), `free of ${bytes(disk.size_bytes)}`),
      stat(
        "Audit",
        whole(audit.lost_count > 0 ? audit.lost_count : audit.waiting_count),
        audit.lost_count > 0 ? "lines lost" : "lines waiting",
      ),
    ),
    h(
      "div",
      { class: "columns" },
      checks([...status.checks, status.master_key, status.clock].filter(Boolean)),
      queues(status.queues),
    ),
  ];
}

const checks = (found) =>
  h(
    "section",
    { class: "card" },
    h("h2", {}, "Dependencies"),
    h(
      "ul",
      { class: "checks" },
      found.map(({ name, ok, detail, remedy }) =>
        h(
          "li",
          {},
          h(
            "span",
            { class: `outcome ${ok ? "identified" : name === "master_key" ? "uncertain" : "failed"}` },
            icon(ok ? "check" : "warning"),
            ok ? "ready" : name === "master_key" ? "to do" : "failed",
          ),
          h(
            "div",
            {},
            h("strong", {}, CHECKS[name] ?? name),
            detail && h("p", {}, detail),
            remedy && h("p", { class: "hint" }, remedy),
          ),
        ),
      ),
    ),
  );

const queues = (found) =>
  h(
    "section",
    { class: "card" },
    h("h2", {}, "Queues"),
    h(
      "ul",
      { class: "checks" },
      found.map((queue) =>
        h(
          "li",
          {},
          h(
            "div",
            {},
            h("strong", {}, sayNetwork(queue.network)),
            h(
              "p",
              {},
              queue.waiting_count === 0 ? "empty" : `${counted(queue.waiting_count, "face")} waiting`,
              queue.seconds_per_item > 0 && `, ${(queue.seconds_per_item * 1000).toFixed(1)} ms each`,
            ),
            queue.refused_count > 0 &&
              h(
                "p",
                { class: "hint" },
                `${counted(queue.refused_count, "request")} refused since the start because of overload.`,
              ),
          ),
        ),
      ),
    ),
  );

/** A label for a network such as "detector/kith-compact". */
function sayNetwork(name) {
  const [role, pack] = name.split("/");
  const does = { detector: "Detection", recognizer: "Recognition", liveness: "Liveness" }[role];
  return does ? `${does} (${pack})` : name;
}

async function stores(signal) {
  const found = await allowed(() => all("/v1/galleries", { signal, most: MAX_GALLERIES }));
  if (found === null || found.length === 0) return h("div", {});
  const rows = found.map((gallery) => {
    const drift = h("span", { class: "hint" }, "…");
    about(gallery.name, drift, signal);
    return [
      h("a", { href: `#/galleries/${encodeURIComponent(gallery.name)}` }, gallery.name),
      whole(gallery.subject_count),
      whole(gallery.template_count),
      drift,
    ];
  });
  return h(
    "section",
    { class: "stack" },
    h("h2", {}, "Galleries"),
    table("Galleries", ["Gallery", "People", "Photos", "Decisions"], rows),
    found.length >= MAX_GALLERIES &&
      h("p", { class: "hint" }, `The first ${whole(found.length)} galleries. “Galleries” lists all.`),
  );
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
