// Events of an answer that is a stream of them. EventSource cannot POST.

/** @param {Response} answer; yields {event, data} with data as text */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    reader.cancel().catch(() => {}); // who stops reading ends the answer: its blocks are free
  }
}

function parsed(block) {
  const found = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (field === "event") found.event = value;
    else if (field === "data") found.data += value;
  }
  return found;
}
