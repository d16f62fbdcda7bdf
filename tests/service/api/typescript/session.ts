// A session with the client that openapi-typescript and openapi-fetch make of the OpenAPI document.
import { readFileSync } from "node:fs";

import createClient from "openapi-fetch";

import type { components, operations, paths } from "./kith.js";

type Outcome = components["schemas"]["IdentifyOut"]["results"][number]["outcome"];
type Options = operations["identify"]["requestBody"]["content"]["application/json"];

const [url, gallery, file] = process.argv.slice(2);
const photo = readFileSync(file).toString("base64");
const kith = createClient<paths>({ baseUrl: url });

const made = await kith.POST("/v1/galleries", { body: { name: gallery, risk: { fpir: 0.001 } } });
if (made.error) throw new Error(made.error.detail);
const path = { gallery, subject: "ada" };
const enrolled = await kith.POST("/v1/galleries/{gallery}/subjects/{subject}/templates", {
  params: { path },
  body: { images: [photo], face: "largest" },
});
if (enrolled.error) throw new Error(enrolled.error.remedy);
const options: Options = { images: [photo], risk: { threshold: 0.5 } };
const found = await kith.POST("/v1/galleries/{gallery}/identify", { params: { path: { gallery } }, body: options });
if (found.error) throw new Error(found.error.detail);
const outcomes: Outcome[] = found.data.results.map((result) => result.outcome);
const missing = await kith.GET("/v1/galleries/{gallery}", { params: { path: { gallery: "absent" } } });
console.log(JSON.stringify({ outcomes, missing: missing.error?.code }));
