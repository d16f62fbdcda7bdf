// The audit in words: labels of its events and outcomes, which a test compares with docs/keys.md, and its lines as sentences.

import { counted } from "./numbers.js";
import { tally } from "./words.js";

export const EVENTS = {
  searched: "Search",
  verified: "Comparison with a person",
  crop_read: "Look at stored pictures",
  templates_enrolled: "Enrollment",
  enrollment_refused: "Refused enrollment",
  subject_put: "Person created or replaced",
  subject_changed: "Person changed",
  subject_merged: "Person merged",
  subject_deleted: "Person erased",
  template_moved: "Photo moved",
  template_deleted: "Photo erased",
  decoy_added: "Mistake corrected",
  decoy_deleted: "Correction undone",
  stranger_remembered: "Stranger remembered",
  stranger_promoted: "Stranger named",
  stranger_merged: "Stranger merged",
  stranger_forgotten: "Stranger forgotten",
  strangers_forgotten: "All strangers forgotten",
  stranger_exported: "Export of a stranger",
  album_grouped: "Album made",
  album_merged: "Groups of an album merged",
  album_split: "Group of an album split",
  album_deleted: "Album erased",
  album_expired: "Album expired",
  retention_applied: "Erased by retention",
  gallery_created: "Gallery created",
  gallery_updated: "Settings changed",
  gallery_deleted: "Gallery erased",
  gallery_imported: "Import",
  gallery_exported: "Export of a gallery",
  subject_exported: "Export of a person",
  threshold_moved: "Threshold changed",
  migration_started: "Migration started",
  migration_cut_over: "Migration: switched to new recognizer",
  migration_rolled_back: "Migration: rolled back",
  migration_finished: "Migration finished",
  job_queued: "Job queued",
  job_canceled: "Job canceled",
  key_created: "Key created",
  key_rotated: "Key replaced",
  key_revoked: "Key revoked",
  webhook_created: "Webhook created",
  webhook_deleted: "Webhook deleted",
  master_key_rotated: "Master key replaced",
  access_refused: "Refused requests",
  database_backed_up: "Backup created",
  database_restored: "Backup restored",
  audit_lines_lost: "Audit lines lost",
};

export const OUTCOMES = {
  done: "done",
  repeated: "repeated after a restore",
  same: "the same person",
  uncertain: "not sure",
  different: "different people",
  no_face: "no face",
  rejected_quality: "photo quality too low",
  rejected_liveness: "not a live person",
  unauthorized: "no valid key",
  forbidden: "the key lacks the scope",
  foreign_origin: "request from another website",
  too_many_streams: "too many event streams",
  inconsistent_template: "unlike the person’s other photos",
  duplicate_subject: "looks like another person",
  gallery_not_found: "gallery not allowed for the key",
  job_not_found: "job of a gallery not allowed for the key",
};

const whom = (person, subjects, strangers, albums) => {
  const people = subjects
    ? counted(subjects.length, "person", "people")
    : strangers.length + albums.length === 0 && person;
  return [
    people,
    strangers.length > 0 && counted(strangers.length, "stranger"),
    albums.length > 0 && counted(albums.length, "album"),
  ]
    .filter(Boolean)
    .join(" and ");
};
const photos = (count) => counted(count, "photo");
const PLAIN = {
  gallery_created: () => "Created the gallery",
  gallery_updated: ({ changed = [] }) => `Changed settings: ${listed(changed)}`,
  gallery_deleted: () => "Erased the gallery",
  gallery_exported: () => "Exported the gallery",
  searched: ({ outcomes }) => `Searched: ${tally(outcomes)}`,
  verified: (_, person, outcome) => `Compared a photo with ${person}: ${OUTCOMES[outcome] ?? outcome}`,
  crop_read: ({ count, subjects, strangers = [], albums = [] }, person) =>
    `Looked at ${counted(count, "stored picture")} of ${whom(person, subjects, strangers, albums)}`,
  templates_enrolled: ({ templates = 1 }, person) => `Enrolled ${photos(templates)} of ${person}`,
  enrollment_refused: ({ count }, person, outcome) =>
    `Refused ${photos(count)} of ${person}: ${OUTCOMES[outcome] ?? outcome}`,
  subject_put: ({ created }, person) => `${created === false ? "Replaced" : "Created"} ${person}`,
  subject_changed: ({ changed = [] }, person) => `Changed ${person}: ${listed(changed)}`,
  subject_deleted: (_, person) => `Erased ${person}`,
  subject_merged: ({ into, templates }, person) => `Merged ${person} with ${photos(templates)} into ${code(into)}`,
  subject_exported: (_, person) => `Exported ${person}`,
  template_moved: ({ to }, person) => `Moved a photo of ${person} to ${code(to)}`,
  template_deleted: (_, person) => `Erased a photo of ${person}`,
  decoy_added: (_, person) => `Noted that a face is not ${person}`,
  decoy_deleted: (_, person) => `No longer noted that a face is not ${person}`,
  access_refused: ({ count }, _, outcome) => `Refused ${counted(count, "request")}: ${OUTCOMES[outcome] ?? outcome}`,
  audit_lines_lost: ({ lines }) => `Lost ${counted(lines, "line")} of the audit`,
};

const listed = (changed) =>
  (Array.isArray(changed) ? changed : Object.keys(changed)).map((name) => name.replaceAll("_", " ")).join(", ");
const code = (pseudonym) => `person ${String(pseudonym).slice(0, 8)}`;

/** A line of the audit as a sentence without its actor: what was done, to whom, in which gallery, and how it ended. */
export function sentence({ event, outcome, gallery, subject, details }) {
  const person = subject ? code(subject) : "a person";
  const where = gallery && event !== "searched" ? ` in “${gallery}”` : "";
  const ended =
    ["done", ""].includes(outcome) || PLAIN[event]?.length === 3 ? "" : ` (${OUTCOMES[outcome] ?? outcome})`;
  const said =
    PLAIN[event]?.(details, person, outcome) ?? [EVENTS[event] ?? event, subject && person].filter(Boolean).join(": ");
  if (event === "searched") return `${said.replace("Searched", `Searched “${gallery}”`)}.`;
  const [what, ...rest] = said.split(": ");
  return `${[`${what}${where}`, ...rest].join(": ")}${ended}.`;
}
