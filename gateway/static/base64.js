// Numbers of the event stream: base64 of little-endian integers.

/** @returns {Uint8Array} */
export function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index += 1) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

/** @returns {Uint16Array} */
export function numbers16Of(text) {
  return new Uint16Array(bytesOf(text).buffer); // browsers run on little-endian machines
}

/** @returns {Uint32Array} */
export function numbers32Of(text) {
  return new Uint32Array(bytesOf(text).buffer);
}
