// Photos packed into a tar: any program reads it, with the names and contents.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { packed } from "../../service/console/tar.js";

const named = (name, content, folder) =>
  Object.assign(new File([content], name), folder && { webkitRelativePath: `${folder}/${name}` });

test("a tar has the files with their names and contents", async () => {
  const long = `${"é".repeat(80)}.jpg`;
  const archive = packed([
    named("a.jpg", "first"),
    named("b.jpg", "x".repeat(512), "2024/summer"),
    named("empty.jpg", ""),
    named(long, "long"),
  ]);
  const input = Buffer.from(await archive.arrayBuffer());
  assert.equal(input.length % 512, 0);
  const tar = (...options) =>
    execFileSync("tar", [...options, "-f", "-", "--quoting-style=literal"], { input }).toString();
  const names = tar("-t").trim().split("\n");
  assert.deepEqual(names.slice(0, 3), ["a.jpg", "2024/summer/b.jpg", "empty.jpg"]);
  assert.ok(long.endsWith(names[3]) && names[3].length > 45);
  assert.equal(tar("-xO"), `first${"x".repeat(512)}long`);
});
