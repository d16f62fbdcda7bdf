// Filing one person's photos under another, and taking that back, which is several requests: what was done before
// something failed stays done, and is told.

import { all, call, subjectPath, templatePath } from "./api.js";

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
 * again, by the same name but since that moment, and gets the photos that it had; `to` is called what it was called.
 */
export async function merge(gallery, from, to) {
  const person = await call("GET", subjectPath(gallery, from));
  const kept = await call("GET", subjectPath(gallery, to));
  const templates = await all(`${subjectPath(gallery, from)}/templates`, "templates", { query: { limit: 1000 } });
  await call("POST", `${subjectPath(gallery, from)}/merge`, { json: { into: to } });
  return async () => {
    await call("PUT", subjectPath(gallery, from), { json: described(person) });
    await call("PATCH", subjectPath(gallery, to), { json: described(kept) });
    await moveAll(
      gallery,
      to,
      from,
      templates.map(({ id }) => id),
    );
  };
}

const described = ({ name, metadata, tags }) => ({ name, metadata, tags });

/** File one template under another person. Returns a function that takes it back. */
export async function move(gallery, template, from, to) {
  await call("PATCH", templatePath(gallery, from, template), { json: { subject: to } });
  return () => call("PATCH", templatePath(gallery, to, template), { json: { subject: from } });
}
