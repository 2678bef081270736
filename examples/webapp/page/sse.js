// Server-sent events from a response's body. EventSource cannot be used: it knows only GET.

/** The connection broke before the server had ended the response. */
export class ConnectionLost extends Error {}

/**
 * The events of a byte stream, as the HTML standard parses them.
 *
 * A chunk may end anywhere: within a character, between the two bytes of a line's end, within a
 * field. Comments, which a server sends to keep a connection open, are passed over; an event
 * without its closing empty line is not given, for it may be cut short.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @yields {{event: string, data: string}}
 * @throws {ConnectionLost} or the signal's own error if the fetch was aborted
 */
export async function* events(body) {
  let event = "";
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length > 0) yield { event: event || "message", data: data.join("\n") };
      event = "";
      data = [];
      continue;
    }
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") event = value;
    else if (name === "data") data.push(value);
  }
}

/** Complete lines, which end with CR LF, LF or CR. */
async function* lines(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        // What an abort gives passes as it is; for a broken connection browsers give TypeErrors.
        throw error instanceof TypeError ? new ConnectionLost(error.message) : error;
      });
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A CR at the very end may be the first half of a CR LF.
      const safe = !done && rest.endsWith("\r") ? rest.slice(0, -1) : rest;
      const whole = safe.split(/\r\n|\n|\r/);
      const last = whole.pop();
      rest = last + rest.slice(safe.length);
      yield* whole;
      if (done) return;
    }
  } finally {
    // Whoever stops reading wants no more of it.
    await reader.cancel().catch(() => {});
  }
}
