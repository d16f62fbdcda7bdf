// Hygiene findings that the user dismissed. The browser stores them, not the service, because they are one user's opinion.
// Erased people are removed here too.

import { read, write } from "./store.js";

export class Aside {
  constructor(gallery) {
    this.name = `kith-aside-${gallery}`;
    this.keys = new Set(JSON.parse(read("localStorage", this.name) ?? "[]"));
  }

  has = (finding) => this.keys.has(keyOf(finding));
  add = (finding) => this.store(this.keys.add(keyOf(finding)));
  remove = (finding) => this.store(this.keys.delete(keyOf(finding)));
  clear = () => this.store(this.keys.clear());

  /** Remove entries that are not in `findings`, the complete list. */
  keepOf(findings) {
    const found = new Set(findings.map(keyOf));
    this.only((key) => found.has(key));
  }

  /** Remove entries of an erased person. */
  forget(subject) {
    this.only((key) => !JSON.parse(key)[1].includes(subject));
  }

  only(wanted) {
    const kept = [...this.keys].filter(wanted);
    if (kept.length === this.keys.size) return;
    this.keys = new Set(kept);
    this.store();
  }

  store() {
    write("localStorage", this.name, this.keys.size > 0 ? JSON.stringify([...this.keys]) : null);
  }
}

const keyOf = ({ kind, subjects, templates }) =>
  JSON.stringify([
    kind,
    subjects.map((one) => one.subject).sort(),
    kind === "lookalikes" || kind === "duplicate_subjects" ? [] : templates.map((one) => one.template).sort(),
  ]);
