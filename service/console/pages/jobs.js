// Long work: how far it is, what became of its items, calling it off; and enrolling many people from one archive.

import { call, galleryPath, part } from "../api.js";
import { galleries, galleryField } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { bytes, counted, duration, when, whole } from "../numbers.js";
import { refusalList, watch } from "../reports.js";
import {
  button,
  confirmed,
  dialog,
  empty,
  field,
  heading,
  linkButton,
  loading,
  problemBox,
  tell,
  toast,
} from "../ui.js";
import { upload } from "../upload.js";

const SHOWN = 50;
const ITEMS = 50;
const MOST = 1000; // that the service gives at once
const KINDS = {
  enrollment: "Enrolling people from an archive",
  migrate: "Teaching the gallery to another recognizer",
  drop_vectors: "Clearing away vectors that answer no more",
};
const STATES = {
  queued: ["waits", "uncertain", "jobs"],
  running: ["running", "unknown", "jobs"],
  succeeded: ["done", "identified", "check"],
  failed: ["failed", "failed", "warning"],
  cancelled: ["called off", "", "close"],
};
const REASONS = {
  enrolled: "enrolled",
  already_enrolled: "were here already",
  no_face: "without a face",
  several_faces: "with several faces",
  image_format: "that are no photos",
  image_damaged: "damaged",
  low_quality: "of too low quality",
  duplicate_subject: "of somebody enrolled under another name",
  inconsistent_template: "unlike the person's other photos",
};
const TYPES = {
  zip: "application/zip",
  tar: "application/x-tar",
  gz: "application/gzip",
  tgz: "application/gzip",
  zst: "application/zstd",
};

export const title = () => "Jobs";

export function render(params, signal) {
  const list = h("ul", { class: "stack" });
  const cards = new Map();
  let first = true;
  const body = h(
    "div",
    {},
    loading(() => new Promise(() => {}), "Asking for the jobs…"),
  );
  let shown = SHOWN;
  const more = button("Show more", async () => ((shown = Math.min(MOST, shown + SHOWN)), await look()));
  const beyond = h("div", { class: "actions" }, more);
  const look = watch(async () => {
    let jobs;
    let next;
    try {
      const query = { gallery: params.gallery, limit: shown };
      ({ jobs, next } = await call("GET", "/v1/jobs", { query, signal }));
    } catch (error) {
      if (error.name !== "AbortError" && first)
        fill(
          body,
          problemBox(error, () => look()),
        );
      throw error;
    }
    first = false;
    show(jobs);
    beyond.hidden = next === null;
    if (shown === MOST) fill(beyond, h("p", { class: "hint" }, `These are the latest ${whole(MOST)}; there are more.`));
    return jobs.some(active);
  }, signal);

  function show(jobs) {
    if (jobs.length === 0)
      return fill(
        body,
        nothing(() => begin(signal, look, params.gallery)),
      );
    for (const job of jobs) {
      if (!cards.has(job.id)) cards.set(job.id, new JobCard(job.id, look, signal));
      cards.get(job.id).update(job);
    }
    const wanted = jobs.map((job) => cards.get(job.id).element);
    // What stands right is not touched: it may have the focus, or be open.
    if (wanted.some((element, i) => list.children[i] !== element) || list.children.length !== wanted.length)
      fill(list, wanted);
    if (list.parentElement !== body) fill(body, list, beyond);
  }

  return h(
    "div",
    { class: "page" },
    heading(
      "Jobs",
      "Long work, which goes on by itself: you may close this page. Finished jobs are listed for two weeks.",
      button("Enroll many at once", () => begin(signal, look, params.gallery), { kind: "primary", icon: "upload" }),
    ),
    params.gallery && h("p", { class: "row" }, `Those of ${params.gallery} alone.`, linkButton("Show all", "#/jobs")),
    look.note,
    body,
  );
}

const active = (job) => job.state === "queued" || job.state === "running";

const nothing = (start) =>
  empty(
    "jobs",
    "No job yet",
    "Enrolling a whole folder of people takes a while, and so it is a job: a zip with a folder for each person, named as the person is.",
    button("Enroll many at once", start, { kind: "primary", icon: "upload" }),
  );

// One job, kept up to date in its place

class JobCard {
  constructor(id, look, signal) {
    this.id = id;
    this.turn = 0; // how often the list of what was refused was begun
    this.listed = null; // how many of them are shown
    this.next = null;
    this.look = look;
    this.signal = signal;
    this.name = h("h2", {});
    this.state = h("p", {});
    this.bar = h("progress", { max: 1, "aria-label": "Progress" });
    this.far = h("p", { class: "far" });
    this.became = h("p", { class: "hint" });
    this.problem = h("div", {});
    this.refused = h("div", {});
    this.cancel = button("Call it off", () => this.callOff(), { kind: "danger" });
    this.items = h(
      "details",
      { class: "items", onToggle: () => this.items.open && this.begin() },
      h("summary", {}, ""),
      this.refused,
    );
    this.element = h(
      "li",
      { class: "card job" },
      h("div", { class: "row between" }, this.name, this.state),
      this.bar,
      this.far,
      this.became,
      this.problem,
      this.items,
      h("div", { class: "actions" }, this.cancel),
    );
  }

  update(job) {
    const text = JSON.stringify(job);
    if (text === this.text) return;
    this.text = text;
    this.job = job;
    const [said, tone, picture] = STATES[job.state];
    const part = job.total ? job.done / job.total : 0;
    fill(
      this.name,
      KINDS[job.kind] ?? job.kind,
      " · ",
      h("a", { href: `#/galleries/${encodeURIComponent(job.gallery)}` }, job.gallery),
    );
    this.state.className = `outcome ${tone}`;
    fill(this.state, icon(picture), job.cancelling ? "ending" : said);
    this.bar.hidden = !active(job);
    if (job.total === null) this.bar.removeAttribute("value");
    else this.bar.value = part;
    this.far.textContent = far(job);
    this.became.textContent = became(job);
    fill(
      this.problem,
      job.problem &&
        h(
          "div",
          { class: "notice error" },
          icon("warning"),
          h("div", {}, h("p", {}, `${job.problem.title}. ${job.problem.detail}`), h("p", {}, job.problem.remedy)),
        ),
    );
    this.items.hidden = job.failed === 0;
    this.items.querySelector("summary").textContent = `What was refused (${whole(job.failed)})`;
    this.cancel.hidden = !active(job) || job.cancelling;
    if (this.items.open && this.listed !== null) this.offer();
  }

  async callOff() {
    const yes = await confirmed({
      title: "Call this job off?",
      text: "What it has done stays. To do the rest, send the same archive again: what is enrolled already is passed over.",
      yes: "Call it off",
    });
    if (!yes) return;
    await call("DELETE", `/v1/jobs/${part(this.id)}`);
    this.look();
  }

  /** List what was refused from its beginning, at least so many. */
  begin(least = ITEMS) {
    this.turn += 1;
    this.listed = null;
    return this.more(null, Math.min(MOST, least), (rows) => fill(this.refused, rows));
  }

  async more(cursor, limit, show) {
    const mine = this.turn;
    const page = await call("GET", `/v1/jobs/${part(this.id)}/items`, {
      query: { failed: true, limit, cursor },
      signal: this.signal,
    }).catch(tell);
    if (!page || mine !== this.turn) return; // begun anew meanwhile
    show(refusalList(page.items.map(({ item, problem }) => [item, problem])));
    this.listed = (this.listed ?? 0) + page.items.length;
    this.next = page.next;
    this.offer();
  }

  /** Further ones, and such as came since. */
  offer() {
    const more = this.next
      ? () => this.more(this.next, ITEMS, (rows) => this.refused.append(rows))
      : () => this.begin(this.listed + ITEMS);
    const wanted = this.next !== null || this.job.failed > this.listed;
    const shown = this.refused.querySelector(".more");
    if (wanted && shown && this.refused.lastChild === shown && shown.next === this.next) return; // may have the focus
    shown?.remove();
    if (wanted) this.refused.append(Object.assign(h("div", { class: "actions more" }, button("Show more", more)), { next: this.next }));
  }
}

function far(job) {
  const of = job.total === null ? counted(job.done, "item") : `${whole(job.done)} of ${counted(job.total, "item")}`;
  if (job.state === "queued" && job.done === 0) return "It begins as soon as a server has a hand free.";
  if (!active(job)) return `${of}, ${when(job.updated_at)}`;
  const left = job.remaining_s === null ? "" : `, about ${duration(job.remaining_s)} left`;
  return `${of}${job.rate === null ? "" : `, ${whole(job.rate)} a second`}${left}`;
}

function became(job) {
  const parts = Object.entries(job.counts).sort(([, a], [, b]) => b - a);
  return parts
    .map(([reason, count]) => `${whole(count)} ${REASONS[reason] ?? reason.replaceAll("_", " ")}`)
    .join(" · ");
}

// Enrolling many

async function begin(signal, look, chosen) {
  const known = await galleries(signal);
  if (known !== null && known.length === 0) {
    toast("There is no gallery to enroll anybody in yet. Make one first.", "error");
    location.hash = "#/galleries";
    return;
  }
  const leaving = new AbortController();
  const where = galleryField(known, null, { chosen });
  const file = h("input", { type: "file", accept: ".zip,.tar,.gz,.tgz,.zst", required: true });
  const largest = h("input", { type: "checkbox" });
  const poor = h("input", { type: "checkbox" });
  const told = h("div", { role: "status" });
  const bar = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Sent" });
  const submit = h("button", { type: "submit", class: "button primary" }, "Begin");
  const send = async (event) => {
    event.preventDefault();
    const [archive] = file.files;
    submit.disabled = true;
    bar.hidden = false;
    try {
      const type = TYPES[archive.name.split(".").at(-1).toLowerCase()] ?? "application/octet-stream";
      const query = { face: largest.checked ? "largest" : "only", allow_low_quality: poor.checked };
      const onProgress = (share) => {
        bar.value = share;
        fill(
          told,
          h(
            "p",
            { class: "hint" },
            share < 1
              ? `${bytes(share * archive.size)} of ${bytes(archive.size)} sent`
              : "Sent. The server looks into it…",
          ),
        );
      };
      await upload(`${galleryPath(where.value)}/enrollments`, archive, {
        query,
        type,
        onProgress,
        signal: leaving.signal,
      });
      box.close();
      toast("The job has begun. You may close this page: it goes on.");
      look();
    } catch (error) {
      bar.hidden = true;
      if (error.name !== "AbortError") fill(told, problemBox(error));
    } finally {
      submit.disabled = false;
    }
  };
  const box = dialog(
    "Enroll many at once",
    h(
      "form",
      { onSubmit: send },
      h(
        "p",
        {},
        "An archive with a folder for each person, named as the person is to be called. Every photo in it is of that person.",
      ),
      h(
        "pre",
        { class: "tree" },
        "people.zip\n├─ Ada Lovelace\n│  ├─ 1.jpg\n│  └─ at work.heic\n└─ Grace Hopper\n   └─ portrait.png",
      ),
      where,
      field("Archive", file, "zip, tar, tar.gz or tar.zst"),
      h("label", { class: "check" }, largest, " Where a photo shows several people, take the largest face"),
      h("label", { class: "check" }, poor, " Take photos of low quality, too"),
      bar,
      told,
      h(
        "div",
        { class: "actions end" },
        h("button", { type: "button", class: "button plain", onClick: () => box.close() }, "Cancel"),
        submit,
      ),
    ),
  );
  box.addEventListener("close", () => leaving.abort());
}
