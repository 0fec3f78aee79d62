"""A Mem0 app that answers from injected KV.

Compared with an app on Mem0 alone, one import is different: ``Memory`` comes from the adapter.
The first run starts a private core with a small model, which takes about a minute on a CPU and
is then shared by every process that asks for the same one.

    pip install '.[mem0,cpu]'    # from a clone; README says what else a CPU needs
    python examples/mem0_app.py
"""

from inferscale_adapters.mem0 import Memory

FACTS = [
    "Alice moved from Leeds to Lisbon in March 2024",
    "Alice works as a marine biologist and studies octopus behaviour",
    "Alice is allergic to shellfish",
    "Alice adopted a greyhound named Pixel in June 2024",
    "Alice plays the cello in an amateur quartet on Thursday evenings",
    "Alice is learning Portuguese with her neighbour Rui",
    "Alice wants to sail to the Azores next summer",
]


def main() -> None:
    memory = Memory()
    memory.delete_all(user_id="alice")
    for fact in FACTS:
        # infer=False stores the text as it is; with infer=True the core's model extracts facts.
        memory.add(fact, user_id="alice", infer=False)
    memory.wait_for_kv(user_id="alice")

    question = "What is the name of Alice's dog?"

    # One call: Mem0's search, then an answer over the memories it found.
    answer = memory.chat(question, user_id="alice", k=5, max_tokens=40, temperature=0)
    print(f"Q: {question}\nA: {answer.text}\n")
    report = answer.inferscale
    if report is not None:
        print(
            f"{report.memory_tokens} memory tokens in the prompt, {report.injected_tokens} of the "
            f"prompt's tokens injected, {report.prefilled_tokens} prefilled"
        )

    # Or in Mem0's own steps: search, build the messages, send them. Streamed here.
    found = memory.search(question, filters={"user_id": "alice"}, top_k=5)
    messages = memory.messages(question, found)
    with memory.complete(
        messages, user_id="alice", max_tokens=40, temperature=0, stream=True
    ) as chunks:
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
    print()
    memory.close()


if __name__ == "__main__":
    main()
