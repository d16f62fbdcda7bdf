// Photos packed into a tar, without reading them: the browser reads each when it is sent.

const BLOCK = 512;
const MAX_NAME = 100; // bytes, of the format of 1988

/** A Blob with `files` in the ustar format. Folders that the user chose are part of the names. */
export function packed(files) {
  const parts = [...files].flatMap((file) => [
    header(file),
    file,
    new Uint8Array((BLOCK - (file.size % BLOCK)) % BLOCK),
  ]);
  return new Blob([...parts, new Uint8Array(2 * BLOCK)]);
}

function header(file) {
  const block = new Uint8Array(BLOCK);
  const write = (text, at) => block.set(new TextEncoder().encode(text), at);
  const octal = (value, digits) => `${value.toString(8).padStart(digits, "0")}\0`;
  write(shortened(file.webkitRelativePath || file.name), 0);
  write(octal(0o600, 7), 100);
  write(octal(0, 7), 108);
  write(octal(0, 7), 116);
  write(octal(file.size, 11), 124);
  write(octal(0, 11), 136);
  write(" ".repeat(8), 148); // the checksum counts as spaces
  write("0", 156);
  write("ustar\x0000", 257);
  const sum = block.reduce((total, byte) => total + byte, 0);
  write(`${octal(sum, 6)} `, 148);
  return block;
}

/** The end of a name that fits: a name that is shortened twice alike gets a number from the service. */
function shortened(name) {
  let characters = [...name];
  while (new TextEncoder().encode(characters.join("")).length > MAX_NAME) characters = characters.slice(1);
  return characters.join("");
}
