// Jobs: progress, items, cancellation, and enrollment of many people from an archive.

import { call, galleryPage, galleryPath, part } from "../api.js";
import { galleries, galleryField } from "../choices.js";
import { ask, careful } from "../dialogs.js";
import { fill, h } from "../dom.js";
import { counted, duration, when, whole } from "../numbers.js";
import { pages, refusalList, renewedList } from "../reports.js";
import { field, ticked } from "../forms.js";
import { button, empty, folded, heading, linkButton, notice, outcome, toast } from "../ui.js";
import { ARCHIVES, archiveType, sender } from "../upload.js";
import { capitalized } from "../words.js";

const SHOWN = 100;
const ITEMS = 50;
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
  ignored: "Other files",
  faces_found: "With faces",
  copy: "Copies",
  image_format: "Not a photo",
  image_damaged: "Damaged",
  duplicate_subject: "Enrolled under another name",
  inconsistent_template: "Unlike the person’s other photos",
};

const LEAD = "Long tasks that run on the server. You can close this page.";
const FOLDERS = "Choose an archive with one folder per person. The folder name is the name of the person.";

export const title = () => "Jobs";

export function render(params, signal) {
  const after = h("p.hint", `The latest ${SHOWN} jobs. “kith jobs list” lists all.`);
  const look = () => list.look();
  const begins = () => begin(signal, look, params.gallery);
  const load = async () => {
    const query = { gallery: params.gallery, limit: SHOWN };
    const { data, next } = await call("GET", "/v1/jobs", { query, signal });
    after.hidden = next === null;
    return data;
  };
  const card = (job) => jobCard(job.id, look, signal);
  const nothing = () => empty("jobs", "No jobs yet", FOLDERS, start(begins));
  const list = renewedList("ul.stack", load, card, nothing, signal, { busy: active, after });
  return h("div.page", [
    heading("Jobs", LEAD, start(begins)),
    params.gallery && h("p.row", [`Jobs of ${params.gallery}.`, linkButton("Show all", "#/jobs")]),
    list.elements,
  ]);
}

const active = (job) => job.state === "queued" || job.state === "running";

const start = (begins) => button("Enroll many people", begins, { kind: "primary", icon: "upload" });

/** A card of a job. The element has `update(job)`, which keeps the opened list and the focus. */
export function jobCard(id, look, signal) {
  const [name, state, far, became, problem] = [h("h2"), h("p"), h("p.far"), h("p.hint"), h("div")];
  const bar = h("progress", { max: 1, "aria-label": "Progress" });
  const [summary, list] = [h("span"), h("div")];
  const items = folded(summary, list, { class: "details items", onToggle: () => items.open && fill(list, refused()) });
  let job = null;

  const refused = () =>
    pages(
      (cursor) => {
        const query = { failed: true, limit: ITEMS, cursor };
        return call("GET", `/v1/jobs/${part(id)}/items`, { query, signal });
      },
      (data) => refusalList(data.map(({ item, problem: why }) => [item, why])),
      "",
    );

  const stopping = () => [
    "Cancel this job?",
    job.kind === "album"
      ? "Its faces are deleted."
      : "Completed work stays. To continue, send the same archive again. It skips enrolled photos.",
    "Cancel the job",
  ];
  const stop = async () => {
    await call("POST", `/v1/jobs/${part(id)}/cancel`);
    look();
  };
  const retry = button("Retry these with the largest face", () => begin(signal, look, job.gallery, job), {
    icon: "upload",
  });
  const cancel = careful("Cancel the job", stopping, stop);
  const element = h("li.card.job", [
    h("div.row.between", [name, state]),
    bar,
    far,
    became,
    problem,
    items,
    h("div.actions", [retry, cancel]),
  ]);
  element.update = (now) => {
    job = now;
    const { failed_count: failed, done_count: done, total_count: total, problem: why } = job;
    const partly = [`done, ${whole(failed)} refused`, "uncertain", "warning"];
    const [said, tone, picture] = job.state === "succeeded" && failed > 0 ? partly : STATES[job.state];
    fill(name, KINDS[job.kind] ?? job.kind, " · ", h("a", { href: galleryPage(job.gallery) }, job.gallery));
    fill(state, outcome(tone, picture, job.canceling ? "stopping" : said));
    bar.hidden = !active(job);
    if (total === null) bar.removeAttribute("value");
    else bar.value = total ? done / total : 0;
    far.textContent = progress(job);
    became.textContent = results(job);
    fill(problem, why && notice("warning", [h("p", `${why.title}. ${why.detail}`), h("p", why.remedy)], "error"));
    items.hidden = failed === 0;
    fill(summary, `Refused items (${whole(failed)})`);
    cancel.hidden = !active(job) || job.canceling;
    retry.hidden = active(job) || !job.counts.several_faces;
  };
  return element;
}

function progress(job) {
  const of =
    job.total_count === null
      ? counted(job.done_count, "item")
      : `${whole(job.done_count)} of ${counted(job.total_count, "item")}`;
  if (job.state === "queued" && job.done_count === 0) return "Waits for a free worker.";
  if (!active(job)) return `${of}, ${when(job.updated_at)}`;
  const left = job.remaining_s === null ? "" : `, about ${duration(job.remaining_s)} left`;
  return `${of}${job.rate === null ? "" : `, ${whole(job.rate)} per second`}${left}`;
}

function results(job) {
  const parts = Object.entries(job.counts).sort(([, a], [, b]) => b - a);
  return parts
    .map(([reason, count]) => `${REASONS[reason] ?? capitalized(reason.replaceAll("_", " "))}: ${whole(count)}`)
    .join(" · ");
}

// Enrolling many

/** Ask for an archive and enroll it. `again`: a job whose photos of several people are retried with the largest face. */
async function begin(signal, look, chosen, again = null) {
  const known = await galleries(signal);
  if (known?.length === 0) return (location.hash = "#/galleries?new=1");
  const where = galleryField(known, null, { chosen });
  const file = h("input", { type: "file", accept: ARCHIVES, required: true });
  const largest = h("input", { type: "checkbox", checked: again !== null });
  const poor = h("input", { type: "checkbox" });
  const sending = sender("Sent. The server reads the archive…");
  const tree = "people.zip\n├─ Ada Lovelace\n│  ├─ 1.jpg\n│  └─ at work.heic\n└─ Grace Hopper\n   └─ portrait.png";
  const elements = [
    again
      ? h("p", `It enrolls the largest face of ${counted(again.counts.several_faces, "photo")} with several people.`)
      : [h("p", FOLDERS), h("pre.tree", tree)],
    where,
    field("Archive", file, again ? "Choose the same archive again." : "zip, tar, tar.gz or tar.zst"),
    ticked(largest, "Use the largest face of photos with several people"),
    ticked(poor, "Accept photos of low quality"),
    sending.element,
  ];
  ask(again ? "Retry with the largest face" : "Enroll many people", "Start", elements, async (until) => {
    const archive = file.files[0];
    const query = { face: largest.checked ? "largest" : "only", allow_low_quality: poor.checked };
    const options = { query, type: archiveType(archive) ?? "application/octet-stream", signal: until };
    await sending.send(`${galleryPath(where.value)}/enrollments`, archive, options);
    toast("The job is queued. You can close this page.");
    look();
  });
}
