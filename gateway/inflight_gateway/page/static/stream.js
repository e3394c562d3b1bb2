// Reads server-sent events from a response.

/** The values of all `data:` lines up to `[DONE]`, parsed.  Returns whether that came. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // comments keep the connection alive
        const data = line.slice(5).trim();
        if (data === "[DONE]") return true;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
