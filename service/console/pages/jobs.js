// Jobs: progress, items, cancellation, and enrollment of many people from an archive.

import { call, galleryPage, galleryPath, part } from "../api.js";
import { galleries, galleryField } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { counted, duration, when, whole } from "../numbers.js";
import { refusalList, watch } from "../reports.js";
import {
  ask,
  button,
  confirmed,
  empty,
  field,
  heading,
  linkButton,
  notice,
  tell,
  ticked,
  toast,
  waiting,
} from "../ui.js";
import { ARCHIVES, archiveType, sender } from "../upload.js";

const SHOWN = 50;
const ITEMS = 50;
const MAX_PAGE = 1000; // limit of the service
const KINDS = {
  enrollment: "Enrollment from an archive",
  album: "Album of photos",
  migrate: "Migration to another recognizer",
  drop_vectors: "Deletion of old embeddings",
};
const STATES = {
  queued: ["queued", "uncertain", "jobs"],
  running: ["running", "unknown", "jobs"],
  succeeded: ["done", "identified", "check"],
  failed: ["failed", "failed", "warning"],
  canceled: ["canceled", "", "close"],
};
const REASONS = {
  enrolled: "Enrolled",
  already_enrolled: "Already enrolled",
  ignored: "Other files",
  faces_found: "With faces",
  copy: "Copies",
  no_face: "No face",
  several_faces: "Several faces",
  image_format: "Not a photo",
  image_damaged: "Damaged",
  low_quality: "Low quality",
  duplicate_subject: "Enrolled under another name",
  inconsistent_template: "Unlike the person’s other photos",
};
/** Archives that this tab has sent, by job, for a retry without another choice of the file. */
const SENT = new Map();

export const title = () => "Jobs";

export function render(params, signal) {
  const list = h("ul.stack");
  const cards = new Map();
  const body = h("div", waiting("Loading jobs…"));
  let shown = SHOWN;
  const more = button("Show more", async () => ((shown = Math.min(MAX_PAGE, shown + SHOWN)), await look()));
  const beyond = h("div.actions", more);
  const begins = () => begin(signal, look, params.gallery);
  const look = watch(
    async () => {
      const query = { gallery: params.gallery, limit: shown };
      const { data: jobs, next } = await call("GET", "/v1/jobs", { query, signal });
      show(jobs);
      beyond.hidden = next === null;
      if (shown === MAX_PAGE) fill(beyond, h("p.hint", `The latest ${whole(MAX_PAGE)} of more jobs.`));
      return jobs.some(active);
    },
    signal,
    body,
  );

  function show(jobs) {
    if (jobs.length === 0) return fill(body, nothing(begins));
    for (const job of jobs) {
      if (!cards.has(job.id)) cards.set(job.id, new JobCard(job.id, look, signal));
      cards.get(job.id).update(job);
    }
    const wanted = jobs.map((job) => cards.get(job.id).element);
    // Keep unchanged elements: they can be focused or open.
    if (wanted.some((element, i) => list.children[i] !== element) || list.children.length !== wanted.length)
      fill(list, wanted);
    if (list.parentElement !== body) fill(body, list, beyond);
  }

  return h("div.page", [
    heading(
      "Jobs",
      "Long tasks that run on the server. You can close this page. Finished jobs are listed for two weeks.",
      button("Enroll many people", begins, { kind: "primary", icon: "upload" }),
    ),
    params.gallery && h("p.row", [`Jobs of ${params.gallery}.`, linkButton("Show all", "#/jobs")]),
    look.note,
    body,
  ]);
}

const active = (job) => job.state === "queued" || job.state === "running";

const nothing = (start) =>
  empty(
    "jobs",
    "No jobs yet",
    "Enroll many people from a zip with one folder per person. The folder name is the name of the person.",
    button("Enroll many people", start, { kind: "primary", icon: "upload" }),
  );

// One job, updated in place

class JobCard {
  constructor(id, look, signal) {
    this.id = id;
    this.turn = 0; // number of restarts of the list of refused items
    this.listed = null; // number of shown items
    this.next = null;
    this.look = look;
    this.signal = signal;
    this.name = h("h2");
    this.state = h("p");
    this.bar = h("progress", { max: 1, "aria-label": "Progress" });
    this.far = h("p.far");
    this.became = h("p.hint");
    this.problem = h("div");
    this.refused = h("div");
    this.retry = button("Retry these with the largest face", () => begin(signal, look, this.job.gallery, this.job), {
      icon: "upload",
    });
    this.cancel = button("Cancel the job", () => this.callOff(), { kind: "danger" });
    this.items = h("details.items", { onToggle: () => this.items.open && this.begin() }, [
      h("summary", ""),
      this.refused,
    ]);
    this.element = h("li.card.job", [
      h("div.row.between", [this.name, this.state]),
      this.bar,
      this.far,
      this.became,
      this.problem,
      this.items,
      h("div.actions", [this.retry, this.cancel]),
    ]);
  }

  update(job) {
    const text = JSON.stringify(job);
    if (text === this.text) return;
    this.text = text;
    this.job = job;
    const { state, failed_count: failed, done_count: done, total_count: total, problem } = job;
    const partly = [`done, ${whole(failed)} refused`, "uncertain", "warning"];
    const [said, tone, picture] = state === "succeeded" && failed > 0 ? partly : STATES[state];
    const gallery = h("a", { href: galleryPage(job.gallery) }, job.gallery);
    fill(this.name, KINDS[job.kind] ?? job.kind, " · ", gallery);
    this.state.className = `outcome ${tone}`;
    fill(this.state, icon(picture), job.canceling ? "stopping" : said);
    this.bar.hidden = !active(job);
    if (total === null) this.bar.removeAttribute("value");
    else this.bar.value = total ? done / total : 0;
    this.far.textContent = far(job);
    this.became.textContent = became(job);
    const told = problem && [h("p", `${problem.title}. ${problem.detail}`), h("p", problem.remedy)];
    fill(this.problem, problem && notice("warning", told, "error"));
    this.items.hidden = failed === 0;
    this.items.querySelector("summary").textContent = `Refused items (${whole(failed)})`;
    this.cancel.hidden = !active(job) || job.canceling;
    this.retry.hidden = active(job) || !job.counts.several_faces;
    if (this.items.open && this.listed !== null) this.offer();
  }

  async callOff() {
    const yes = await confirmed(
      "Cancel this job?",
      this.job.kind === "album"
        ? "Its faces are deleted."
        : "Completed work stays. To continue, send the same archive again. It skips enrolled photos.",
      "Cancel the job",
    );
    if (!yes) return;
    await call("POST", `/v1/jobs/${part(this.id)}/cancel`);
    this.look();
  }

  /** List refused items from the start, at least `least`. */
  begin(least = ITEMS) {
    this.turn += 1;
    this.listed = null;
    return this.more(null, Math.min(MAX_PAGE, least), (rows) => fill(this.refused, rows));
  }

  async more(cursor, limit, show) {
    const mine = this.turn;
    const page = await call("GET", `/v1/jobs/${part(this.id)}/items`, {
      query: { failed: true, limit, cursor },
      signal: this.signal,
    }).catch(tell);
    if (!page || mine !== this.turn) return; // the list was restarted
    show(refusalList(page.data.map(({ item, problem }) => [item, problem])));
    this.listed = (this.listed ?? 0) + page.data.length;
    this.next = page.next;
    this.offer();
  }

  /** Offer more items, also new ones. */
  offer() {
    const more = this.next
      ? () => this.more(this.next, ITEMS, (rows) => this.refused.append(rows))
      : () => this.begin(this.listed + ITEMS);
    const wanted = this.next !== null || this.job.failed_count > this.listed;
    const shown = this.refused.querySelector(".more");
    if (wanted && shown && this.refused.lastChild === shown && shown.next === this.next) return; // it can be focused
    shown?.remove();
    if (wanted)
      this.refused.append(Object.assign(h("div.actions.more", button("Show more", more)), { next: this.next }));
  }
}

function far(job) {
  const of =
    job.total_count === null
      ? counted(job.done_count, "item")
      : `${whole(job.done_count)} of ${counted(job.total_count, "item")}`;
  if (job.state === "queued" && job.done_count === 0) return "Waits for a free worker.";
  if (!active(job)) return `${of}, ${when(job.updated_at)}`;
  const left = job.remaining_s === null ? "" : `, about ${duration(job.remaining_s)} left`;
  return `${of}${job.rate === null ? "" : `, ${whole(job.rate)} per second`}${left}`;
}

function became(job) {
  const parts = Object.entries(job.counts).sort(([, a], [, b]) => b - a);
  return parts
    .map(([reason, count]) => `${REASONS[reason] ?? reason.replaceAll("_", " ")}: ${whole(count)}`)
    .join(" · ");
}

// Enrolling many

/** Ask for an archive and enroll it. `again`: a job whose photos of several people are retried with the largest face. */
async function begin(signal, look, chosen, again = null) {
  const known = await galleries(signal);
  if (known !== null && known.length === 0) {
    toast("Create a gallery first.", "error");
    location.hash = "#/galleries";
    return;
  }
  const where = galleryField(known, null, { chosen });
  const sent = SENT.get(again?.id);
  const file = h("input", { type: "file", accept: ARCHIVES, required: sent === undefined });
  const largest = h("input", { type: "checkbox", checked: again !== null });
  const poor = h("input", { type: "checkbox" });
  const sending = sender("Sent. The server reads the archive…");
  const tree = "people.zip\n├─ Ada Lovelace\n│  ├─ 1.jpg\n│  └─ at work.heic\n└─ Grace Hopper\n   └─ portrait.png";
  const elements = [
    again
      ? h(
          "p",
          `Kith enrolls the largest face of ${counted(again.counts.several_faces, "photo")} with several people. It skips enrolled photos.`,
        )
      : [
          h("p", "Choose an archive with one folder per person. The folder name is the name of the person."),
          h("pre.tree", tree),
        ],
    where,
    field(
      "Archive",
      file,
      sent
        ? `Without a choice: “${sent.name}” again.`
        : again
          ? "Choose the same archive again."
          : "zip, tar, tar.gz or tar.zst",
    ),
    ticked(largest, "Use the largest face of photos with several people"),
    ticked(poor, "Accept photos of low quality"),
    sending.element,
  ];
  ask(again ? "Retry with the largest face" : "Enroll many people", "Start", elements, async (until) => {
    const archive = file.files[0] ?? sent;
    const query = { face: largest.checked ? "largest" : "only", allow_low_quality: poor.checked };
    const options = { query, type: archiveType(archive) ?? "application/octet-stream", signal: until };
    const job = await sending.send(`${galleryPath(where.value)}/enrollments`, archive, options);
    SENT.set(job.id, archive);
    toast("The job is queued. You can close this page.");
    look();
  });
}
