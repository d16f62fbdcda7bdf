// Merge of two people, and its undo, which takes several requests. After an error the completed requests stay, and the
// error reports them.

import { all, call, subjectPath, templatePath } from "./api.js";
import { parsed } from "./words.js";

/** A partial move: `moved` of `all` photos. `problem`: the first error. */
class Partly extends Error {
  constructor(moved, all, problem) {
    super(`${moved} of ${all} photos were moved. ${problem.message}`);
    this.remedy = problem.remedy || "Look again, and repeat it. Moved photos stay moved.";
  }
}

/** Move templates of `from` to `to`, one after another. Throws Partly. */
async function moveAll(gallery, from, to, templates) {
  let moved = 0;
  let problem = null;
  for (const template of templates) {
    try {
      await call("PATCH", templatePath(gallery, from, template), { json: { subject: to } });
      moved += 1;
    } catch (error) {
      problem ??= error;
    }
  }
  if (problem !== null) throw new Partly(moved, templates.length, problem);
}

/**
 * Move all data of `from` to `to`, and erase `from`. Returns an undo function. It creates the person again, with a new
 * creation time, and moves the photos back. `to` loses the merged data and keeps later changes.
 */
export async function merge(gallery, from, to) {
  const person = await call("GET", subjectPath(gallery, from), { parse: parsed });
  const kept = await call("GET", subjectPath(gallery, to), { parse: parsed });
  const templates = await all(`${subjectPath(gallery, from)}/templates`, { query: { limit: 1000 } });
  await call("POST", `${subjectPath(gallery, from)}/merge`, { json: { into: to } });
  let made = false;
  return async () => {
    // Another person may have the id now. A repeated undo must accept the person that the first attempt created.
    const headers = made ? {} : { "If-None-Match": "*" };
    await call("PUT", subjectPath(gallery, from), { json: described(person), headers });
    made = true;
    const json = apart(await call("GET", subjectPath(gallery, to), { parse: parsed }), kept, person);
    if (Object.keys(json).length > 0) await call("PATCH", subjectPath(gallery, to), { json });
    await moveAll(
      gallery,
      to,
      from,
      templates.map(({ id }) => id),
    );
  };
}

const described = ({ name, metadata, tags }) => ({ name, metadata, tags });

/**
 * The changes that remove from `now` what `kept` got from `gone` in the merge
 * (service/storage/repositories/subjects.py). Missing fields stay. All three come from `parsed`.
 */
export function apart(now, kept, gone) {
  const got = ([entry, value]) =>
    !Object.hasOwn(kept.metadata, entry) &&
    Object.hasOwn(gone.metadata, entry) &&
    JSON.stringify(gone.metadata[entry]) === JSON.stringify(value);
  const entries = Object.entries(now.metadata);
  const own = entries.filter((entry) => !got(entry));
  const tags = now.tags.filter((tag) => kept.tags.includes(tag) || !gone.tags.includes(tag));
  return {
    ...(kept.name === null && gone.name !== null && now.name === gone.name && { name: null }),
    ...(own.length < entries.length && { metadata: Object.fromEntries(own) }),
    ...(tags.length < now.tags.length && { tags }),
  };
}

/** Move one template to another person. Returns an undo function. */
export async function move(gallery, template, from, to) {
  await call("PATCH", templatePath(gallery, from, template), { json: { subject: to } });
  return () => call("PATCH", templatePath(gallery, to, template), { json: { subject: from } });
}
