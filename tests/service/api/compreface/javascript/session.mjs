// Calls the recognition functions of CompreFace's JavaScript SDK, and prints the answers as JSON.
// Arguments: server, port, API key, folder with photos.
import { CompreFace } from "@exadel/compreface-js-sdk";
import { readFileSync } from "fs";
import { chdir } from "process";

const [server, port, key, photos] = process.argv.slice(2);
chdir(photos); // the SDK takes a path for a file only if it begins with a dot
console.log = () => {}; // the SDK prints API keys
const compreFace = new CompreFace(server, Number(port), { det_prob_threshold: 0.8 });
const recognition = compreFace.initFaceRecognitionService(key);
const faces = () => recognition.getFaceCollection(); // each call changes the URL of its collection
const subjects = () => recognition.getSubjects();
const base64 = (name) => readFileSync(name).toString("base64");
const answers = {};

answers.added = await recognition.getSubjects().add("Bo");
answers.enrolled = await new CompreFace(server, Number(port), {})
  .initFaceRecognitionService(key)
  .getFaceCollection()
  .add("./astronaut.jpg", "Ada", {});
answers.known = await recognition.recognize("./astronaut2.jpg", { limit: 1 });
answers.stranger = await recognition.recognize(base64("actor.jpg"), {});
answers.listed = await faces().list();
answers.renamed = await subjects().rename("Bo", "Cy");
answers.subjects = await subjects().list();
answers.noFace = await recognition.recognize("./nobody.jpg", {}).catch((error) => error.response.data);
answers.several = await faces().delete_multiple_images([answers.enrolled.image_id]);
answers.emptied = await faces().delete_all_subject("Ada");
answers.deleted = await subjects().delete("Cy");
answers.deletedAll = await subjects().deleteAll();
process.stdout.write(JSON.stringify(answers));
