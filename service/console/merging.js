// Filing one person's photos under another, and taking that back, which is several requests: what was done before
// something failed stays done, and is told.

import { all, call, subjectPath, templatePath } from "./api.js";
import { parsed } from "./words.js";

/** An act that was done in part: `moved` of `all` photos; `problem`: why the first that was not could not be. */
class Partly extends Error {
  constructor(moved, all, problem) {
    super(`${moved} of ${all} photos were moved. ${problem.message}`);
    this.remedy = problem.remedy || "Look again, and repeat it: what was moved stays where it is.";
  }
}

/** File templates of `from` under `to`, in turn. Throws Partly. */
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
 * File everything of `from` under `to`, and erase `from`. Returns a function that takes it back: the person is made
 * again, by the same name but since that moment, and gets the photos that it had; `to` loses what it got, and keeps what
 * was said of it since.
 */
export async function merge(gallery, from, to) {
  const person = await call("GET", subjectPath(gallery, from), { parse: parsed });
  const kept = await call("GET", subjectPath(gallery, to), { parse: parsed });
  const templates = await all(`${subjectPath(gallery, from)}/templates`, "templates", { query: { limit: 1000 } });
  await call("POST", `${subjectPath(gallery, from)}/merge`, { json: { into: to } });
  let made = false;
  return async () => {
    // Somebody may have been given the id since; who repeats this is not to be stopped by what they made themselves.
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
 * What is to be said of somebody who is `now` so that nothing of `gone` is left that `kept` got by the merge (see
 * service/storage/repositories/subject_merging.py); fields that lack stay as they are. All three as `parsed` reads them.
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

/** File one template under another person. Returns a function that takes it back. */
export async function move(gallery, template, from, to) {
  await call("PATCH", templatePath(gallery, from, template), { json: { subject: to } });
  return () => call("PATCH", templatePath(gallery, to, template), { json: { subject: from } });
}
