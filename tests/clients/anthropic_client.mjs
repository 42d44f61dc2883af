// The official `@anthropic-ai/sdk` for node.
import Anthropic from "@anthropic-ai/sdk";
import {
  ANSWER, KEY, NATIVE_URL, PARAMETERS, PERSON, QUESTION, REASONING, SCRIPT_URL, WEATHER, assert,
  assertPerson, run,
} from "./cases.mjs";

const native = new Anthropic({ baseURL: NATIVE_URL, apiKey: KEY, maxRetries: 0 });
const script = new Anthropic({ baseURL: SCRIPT_URL, apiKey: KEY, maxRetries: 0 });
const fields = { model: "default", max_tokens: 200 };
const ask = { ...fields, temperature: 0, messages: [{ role: "user", content: QUESTION }] };
const tools = [{ name: "get_weather", input_schema: PARAMETERS }];

await run({
  async chat() {
    const answer = await native.messages.create(ask);
    assert.match(answer.content[0].text, /Paris/);
    assert.equal(answer.stop_reason, "end_turn");
    const counted = await native.messages.countTokens({ model: "default", messages: ask.messages });
    const { input_tokens, cache_read_input_tokens } = answer.usage;
    assert.equal(counted.input_tokens, input_tokens + cache_read_input_tokens);
  },
  async stream() {
    let text = "";
    const events = native.messages.stream(ask).on("text", (delta) => (text += delta));
    const answer = await events.finalMessage();
    assert.match(text, /Paris/);
    assert.equal(answer.content[0].text, text);
    assert(answer.usage.output_tokens > 1);
  },
  async tools() {
    const messages = [{ role: "user", content: WEATHER }];
    const whole = await script.messages.create({ ...fields, tools, messages });
    const streamed = await script.messages.stream({ ...fields, tools, messages }).finalMessage();
    for (const { content, stop_reason } of [whole, streamed]) {
      assert.equal(stop_reason, "tool_use");
      const [thinking, text, call] = content;
      assert.deepEqual([thinking.thinking, text.text], [REASONING, "One moment."]);
      assert.deepEqual([call.name, call.input], ["get_weather", { city: "Paris" }]);
      const result = { type: "tool_result", tool_use_id: call.id, content: "18 degrees" };
      const turns = [...messages, { role: "assistant", content }, { role: "user", content: [result] }];
      const answer = await script.messages.create({ ...fields, tools, messages: turns });
      assert.deepEqual(answer.content.map((block) => block.text), [ANSWER]);
    }
  },
  async structured() {
    const output_config = { format: { type: "json_schema", schema: PERSON } };
    const answer = await native.messages.create({ ...ask, output_config });
    assertPerson(JSON.parse(answer.content[0].text));
  },
  async error() {
    await assert.rejects(native.messages.create({ ...ask, model: "nobody" }), (caught) => {
      assert(caught instanceof Anthropic.NotFoundError);
      assert(caught.requestID);
      return caught.error.error.type === "not_found_error";
    });
  },
});
