// Several requests as one act: filing one person's photos under another, and taking that back. What was done before
// something failed stays done, and is told.

import { call, subjectPath, templatePath } from "./api.js";

/** What became of an act: `moved` are the templates, `left` those that were refused, `problem` why the first was. */
class Partly extends Error {
  constructor({ moved, left, problem }) {
    super(`${moved.length} of ${moved.length + left.length} photos were moved. ${problem.message}`);
    this.remedy = problem.remedy || "Look again, and repeat it: what was moved stays where it is.";
    this.moved = moved;
  }
}

/** File templates of `from` under `to`, in turn; `step(done, total)` after each. Throws Partly. */
async function moveAll(gallery, from, to, templates, step) {
  const moved = [];
  const left = [];
  let problem = null;
  for (const template of templates) {
    try {
      await call("PATCH", templatePath(gallery, from, template), { json: { subject: to } });
      moved.push(template);
    } catch (error) {
      left.push(template);
      problem ??= error;
    }
    step(moved.length + left.length, templates.length);
  }
  if (problem !== null) throw new Partly({ moved, left, problem });
}

/**
 * File everything of `from` under `to`, and delete `from`, whom nothing is left of. Returns a function that takes it
 * back: the person is made again, by the same name but since that moment, and gets the photos that it had.
 */
export async function merge(gallery, from, to, step) {
  const person = await call("GET", subjectPath(gallery, from));
  const { templates } = await call("GET", `${subjectPath(gallery, from)}/templates`, { query: { limit: 1000 } });
  const ids = templates.map((template) => template.id);
  await moveAll(gallery, from, to, ids, step);
  const { templates: since } = await call("GET", `${subjectPath(gallery, from)}/templates`, { query: { limit: 1000 } });
  if (since.length > 0)
    throw new Partly({ moved: ids, left: since, problem: new Error("Somebody enrolled more meanwhile.") });
  await call("DELETE", subjectPath(gallery, from));
  return async (back) => {
    const { name, metadata, tags } = person;
    await call("PUT", subjectPath(gallery, from), { json: { name, metadata, tags } });
    await moveAll(gallery, to, from, ids, back);
  };
}

/** File one template under another person. Returns a function that takes it back. */
export async function move(gallery, template, from, to) {
  await call("PATCH", templatePath(gallery, from, template), { json: { subject: to } });
  return () => call("PATCH", templatePath(gallery, to, template), { json: { subject: from } });
}
