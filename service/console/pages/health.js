// Whether the service is well, what runs on which device and why, and what lies where; it looks again by itself.

import { all, call, galleryPath } from "../api.js";
import { fill, h, icon } from "../dom.js";
import { bytes, counted, duration, whole } from "../numbers.js";
import { watch } from "../reports.js";
import { button, heading, linkButton, loading, problemBox, stat, table } from "../ui.js";

const MOST_GALLERIES = 200;
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
  watch: ["watch it", "uncertain", "question"],
  drifted: ["drifted", "failed", "warning"],
  too_few: ["too few searches to tell", "", "question"],
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
    loading(() => new Promise(() => {}), "Asking how it is…"),
  );
  let forbidden = false;
  const look = watch(async () => {
    const ready = await readiness(signal);
    // Asked for again and again, a refusal would fill the audit.
    const status = forbidden
      ? null
      : await allowed(
          () => call("GET", "/v1/status", { signal }),
          ({ status: refused }) => (forbidden = refused === 401 || refused === 403),
        );
    const said = JSON.stringify([ready.version, ready.problem?.document]);
    if (said !== told) fill(well, verdict(ready)); // an alert is read aloud, once
    told = said;
    fill(seen, status === null ? unseen() : figures(status));
    if (now.parentElement !== body) {
      fill(now, well, seen);
      fill(
        body,
        now,
        loading(() => models(signal), "Asking what is served…"),
        loading(() => stores(signal), "Asking for the galleries…"),
      );
    }
    return false;
  }, signal);
  return h(
    "div",
    { class: "page" },
    heading(
      "Health",
      "Whether the service is well, what it runs on, and how full it is. It looks again by itself.",
      linkButton("API keys", "#/keys", { icon: "key" }),
      linkButton("Audit", "#/audit", { icon: "docs" }),
      button("Look now", look),
    ),
    body,
  );
}

/** Ready, with its version; or the problem that says why not. */
async function readiness(signal) {
  try {
    return { ...(await call("GET", "/readyz", { signal })), problem: null };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { problem: error };
  }
}

/** What the key may see; null where it may not, or nothing comes. */
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
        h(
          "div",
          {},
          h("h2", {}, "All is well"),
          h("p", {}, `Kith ${version} answers, and everything that it needs does, too.`),
        ),
      )
    : problemBox(problem);

const unseen = () => h("p", { class: "hint" }, "A key for all galleries with the scope read sees more here.");

function figures(status) {
  const { audit, disk, jobs } = status;
  const waiting = status.queues.reduce((sum, queue) => sum + queue.waiting, 0);
  return [
    h(
      "dl",
      { class: "stats card" },
      stat("Running for", duration(status.uptime_s), `version ${status.version}`),
      stat(
        "Requests under way",
        whole(status.requests_in_progress),
        waiting === 0 ? "none waits for a network" : `${whole(waiting)} wait for a network`,
      ),
      jobs &&
        stat(
          "Jobs",
          whole((jobs.running ?? 0) + (jobs.queued ?? 0)),
          `under way; ${whole(jobs.failed ?? 0)} failed in two weeks`,
        ),
      disk && stat("Disk", bytes(disk.free_bytes), `free of ${bytes(disk.size_bytes)}`),
      stat(
        "Audit",
        audit.lost > 0 ? `${whole(audit.lost)} lost` : whole(audit.waiting),
        audit.lost > 0 ? "lines could not be written" : "lines wait to be written",
      ),
    ),
    h("div", { class: "columns" }, checks([...status.checks, ...retention(status.retention)]), queues(status.queues)),
  ];
}

/** As checks: the clock, and galleries whose retention waits for a confirmation. */
const retention = (found) =>
  found === null
    ? []
    : [
        found.clock,
        ...Object.entries(found.held ?? {}).map(([gallery, due]) => ({
          name: `Retention of ${gallery}`,
          ok: false,
          detail: `${whole(due.due_subjects)} of ${whole(due.subjects)} people are past their age: too many to erase without a confirmation.`,
          remedy: `If the clock is right: kith gallery retention ${gallery} --erase`,
        })),
      ];

const checks = (found) =>
  h(
    "section",
    { class: "card" },
    h("h2", {}, "What it needs"),
    h(
      "ul",
      { class: "checks" },
      found.map(({ name, ok, detail, remedy }) =>
        h(
          "li",
          {},
          h(
            "span",
            { class: `outcome ${ok ? "identified" : "failed"}` },
            icon(ok ? "check" : "warning"),
            ok ? "well" : "not well",
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
              queue.waiting === 0 ? "nothing waits" : `${counted(queue.waiting, "face")} wait`,
              queue.seconds_per_item > 0 && `, ${(queue.seconds_per_item * 1000).toFixed(1)} ms each`,
            ),
            queue.refused > 0 &&
              h(
                "p",
                { class: "hint" },
                `${counted(queue.refused, "request")} refused since the start: too many at once.`,
              ),
          ),
        ),
      ),
    ),
  );

/** "detector/kith-compact": what it does, and whose it is. */
function sayNetwork(name) {
  const [role, pack] = name.split("/");
  const does = { detector: "Finding faces", recognizer: "Recognizing them", liveness: "Telling people from pictures" }[
    role
  ];
  return does ? `${does} (${pack})` : name;
}

async function models(signal) {
  const served = await call("GET", "/v1/models", { signal });
  return h(
    "section",
    { class: "stack" },
    h("h2", {}, "Models and devices"),
    h(
      "ul",
      { class: "cards models" },
      served.models.map((model) =>
        h(
          "li",
          { class: "card" },
          h("h3", {}, model.display_name),
          h(
            "p",
            { class: "row" },
            h("span", { class: "tag" }, model.model),
            h(
              "span",
              { class: `outcome ${model.calibrated ? "identified" : "uncertain"}` },
              icon(model.calibrated ? "check" : "question"),
              model.calibrated ? "calibrated" : "not calibrated",
            ),
          ),
          !model.calibrated &&
            h(
              "p",
              { class: "hint" },
              "Nothing is known of how alike strangers are to it: risks cannot be asked for, only bare similarities. Calibrate it by kith calibrate.",
            ),
          network("Finding faces", model.detection),
          network("Recognizing them", model.recognition),
          model.liveness && network("Telling people from pictures", model.liveness),
          h(
            "details",
            {},
            h("summary", {}, "Details"),
            h(
              "dl",
              { class: "pairs" },
              [
                ["Finding faces", model.detection],
                ["Recognizing them", model.recognition],
                ["Telling people from pictures", model.liveness],
              ].map(([does, role]) => role && [h("dt", {}, does), h("dd", {}, role.why)]),
              h("dt", {}, "Fingerprint"),
              h("dd", {}, h("code", {}, model.recognizer)),
              h("dt", {}, "Dimensions"),
              h("dd", {}, whole(model.dimension)),
            ),
          ),
        ),
      ),
    ),
  );
}

const network = (does, { engine, precision, providers }) =>
  h(
    "div",
    { class: "network" },
    h("strong", {}, does),
    h(
      "p",
      {},
      `${engine}, ${precision}, on ${providers.map((provider) => provider.replace("ExecutionProvider", "")).join(", ")}`,
    ),
  );

async function stores(signal) {
  const found = await allowed(() => all("/v1/galleries", "galleries", { signal, most: MOST_GALLERIES }));
  if (found === null || found.length === 0) return h("div", {});
  const rows = found.map((gallery) => {
    const index = h("span", { class: "hint" }, "…");
    const drift = h("span", { class: "hint" }, "…");
    about(gallery.name, index, drift, signal);
    return [
      h("a", { href: `#/galleries/${encodeURIComponent(gallery.name)}` }, gallery.name),
      whole(gallery.subjects),
      whole(gallery.templates),
      index,
      drift,
    ];
  });
  return h(
    "section",
    { class: "stack" },
    h("h2", {}, "Galleries"),
    table("Galleries", ["Gallery", "People", "Photos", "Index", "Decisions"], rows),
    found.length >= MOST_GALLERIES &&
      h("p", { class: "hint" }, `These are the first ${whole(found.length)}. The others are under “Galleries”.`),
  );
}

/** One after the other would take long, and all at once would be many: each is asked for when it comes into view. */
function about(gallery, index, drift, signal) {
  const seen = new IntersectionObserver(async ([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    try {
      const [{ drift: found }, stats] = await Promise.all([
        call("GET", galleryPath(gallery), { signal }),
        call("GET", `${galleryPath(gallery)}/stats`, { signal }),
      ]);
      fill(
        index,
        stats.index.kind,
        stats.index.memory_bytes > 0 && `, ${bytes(stats.index.memory_bytes)}`,
        stats.index.recall && `, finds ${(100 * stats.index.recall.at_1).toFixed(1)} %`,
      );
      index.title = stats.index.reason;
      const [said, tone, picture] = DRIFTS[found?.state] ?? DRIFTS.too_few;
      drift.className = tone ? `outcome ${tone}` : "hint";
      fill(drift, tone && icon(picture), said);
      drift.title = found?.detail ?? "";
    } catch (error) {
      if (error.name !== "AbortError") fill(index, error.message);
      fill(drift, "");
    }
  });
  seen.observe(index);
  signal.addEventListener("abort", () => seen.disconnect());
}
