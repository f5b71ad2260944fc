// Conversations, kept in this browser only: the newest first, a bounded number of them. And as files to take along.

const KEY = "anabranch-chats";
const MOST = 50;

export const newChat = () => ({ id: `${Date.now()}-${Math.random()}`, messages: [] });

const isChat = (chat) => Array.isArray(chat?.messages) && chat.messages.every((one) => typeof one?.content === "string");

export function chats() {
  try {
    return JSON.parse(localStorage.getItem(KEY)).filter(isChat);
  } catch {
    return []; // none yet, a browser that keeps nothing, or something else under this name
  }
}

/** Read again first: another tab may have kept one. Where there is no room, the oldest give way. */
export function keep(chat) {
  const kept = [chat, ...chats().filter((other) => other.id !== chat.id)].slice(0, MOST);
  while (kept.length) {
    try {
      return localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      kept.pop();
    }
  }
}

export function forgetAll() {
  try {
    localStorage.removeItem(KEY);
  } catch {
    // then nothing was kept
  }
}

export const title = (chat) => chat.messages[0]?.content.replace(/\s+/g, " ").slice(0, 60) ?? "";

const FILES = {
  json: ["application/json", (messages) => JSON.stringify({ messages }, null, 2)],
  md: ["text/markdown", (messages) => messages.map(({ role, content }) => `## ${role}\n\n${content}\n`).join("\n")],
};

/** messages: as the API has them. */
export function download(messages, kind) {
  const [type, text] = FILES[kind];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text(messages)], { type }));
  link.download = `chat.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
