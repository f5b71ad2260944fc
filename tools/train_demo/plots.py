# ruff: noqa: E501 (one stage a line)
"""What stories are made of: plots, stage by stage, and the sentences between their stages.

A plot is a block of lines `stage: one way to say it | another`. Ways of one stage fit every way of the next. `ask` is
what the user names, `sum` the story in one sentence, `qa` a question about it = its answer. `stories` puts them
together.
"""

from __future__ import annotations


def ways(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def blocks(text: str) -> list[dict[str, list[str]]]:
    found = []
    for block in text.strip().split("\n\n"):
        plot: dict[str, list[str]] = {}
        for line in block.splitlines():
            stage, _, rest = line.partition(": ")
            plot.setdefault(stage, []).extend([rest] if stage == "qa" else ways(rest))
        found.append(plot)
    return found


PLOTS = blocks("""
ask: who finds {a_thing} | who found {a_thing} | who finds {a_thing} {place} | and {a_thing}
begin: One day, {name} found {a_thing} {place}. | One morning, {he} saw {a_thing} {place}. | {name} was playing {place} when {he} found {a_thing}.
feel: "Who does this belong to?" {he} asked. | {He} had never seen such a nice {thing} before. | {He} picked it up and looked at it from all sides.
try: {He} asked everyone {he} met, but nobody knew whose {thing} it was. | {name} carried the {thing} from door to door. | {He} waited there for an hour, but nobody came for it.
turn: Then {friend} the {friend_kind} came along with a sad face. "I have lost my {thing}," said {friend}. | At last, {he} met {friend} the {friend_kind}, who was looking for something. "My {thing} is gone," {friend} said.
end: {name} gave the {thing} back, and {friend} was so happy that they played with it together. | {name} handed it over at once. From then on, the two of them shared the {thing}. | "Here it is!" said {name}. {friend} thanked {him}, and they became good friends.
sum: {name} the {kind} finds {a_thing} {place} and gives it back to {friend}.
qa: What did {name} find? = {name} found {a_thing}.
qa: Where did {name} find the {thing}? = {name} found it {place}.
qa: Whose {thing} was it? = It belonged to {friend} the {friend_kind}.

ask: who loses {a_thing} | who lost {his} {thing} | who cannot find {his} {thing}
begin: One day, {name} could not find {his} {thing}. | {name} had {a_thing}, and {he} took it everywhere. But one afternoon, it was gone. | When {name} woke up, {his} {thing} was not there any more.
feel: {He} felt sad, for {he} loved that {thing}. | "Where can it be?" {he} asked. | {He} had looked after it so well.
try: {name} looked under the bed, behind the door and in every corner. | First {he} searched the house, and then {he} searched the garden. | {He} thought hard about where {he} had been the day before.
turn: {friend} the {friend_kind} came to help. "Let us go back the way you came," said {friend}. | "I will help you look," said {friend} the {friend_kind}. Two can see more than one.
end: And there it was, {place}! {name} hugged the {thing} and thanked {friend}. | Soon they found the {thing} {place}. {name} jumped for joy. | In the end, {friend} saw it {place}, and {name} laughed with relief.
sum: {name} the {kind} loses {a_thing} and finds it {place} with the help of {friend}.
qa: What did {name} lose? = {name} lost {his} {thing}.
qa: Where was the {thing}? = The {thing} was {place}.
qa: Who helped {name}? = {friend} the {friend_kind} helped {name}.

ask: who is afraid of {fear} | who was scared of {fear} | who is not brave | who is scared of {fear}
begin: There was only one problem: {name} was afraid of {fear}. | But {name} was very afraid of {fear}. | Nobody knew it, but {fear} scared {him}.
feel: {His} heart beat fast when {he} thought of it. | {He} did not tell anybody about it. | {He} wanted so much to be brave.
try: One evening, {he} told {friend} the {friend_kind} about it. | At last, {he} asked {friend} the {friend_kind}, "Are you ever afraid?"
turn: "Everyone is afraid of something," said {friend}. "Take my hand and count to ten." | "I was afraid once, too," said {friend}. "It gets easier when you are not alone." | {friend} did not laugh. "Let us try it together, one small step at a time," {friend} said.
end: They tried it together, and it was not so bad. After that, {name} was not afraid of {fear} any more. | {name} tried, and {he} could do it. That night, {he} was proud. | Step by step, the fear grew smaller. Soon {name} could even laugh about {fear}.
sum: {name} the {kind} is afraid of {fear} and learns to be brave with the help of {friend}.
qa: What was {name} afraid of? = {name} was afraid of {fear}.
qa: Who helped {name}? = {friend} the {friend_kind} helped {him}.

ask: who wants to {skill} | who learns to {skill} | who cannot {skill} | who can't {skill}
begin: More than anything, {name} wanted to {skill}. | {name} could not {skill}, and that made {him} sad. | All the others could {skill}, but {name} could not.
feel: "I will never learn it," {he} said. | Every night, {he} dreamed of it. | {He} did not want to give up.
try: {He} tried it on Monday, and it went wrong. {He} tried it on Tuesday, and it went a little better. | {name} tried once, twice, three times. Each time, something went wrong. | So {he} got up early every day and practiced alone.
turn: {friend} the {friend_kind} watched {him} and said, "Slow down. Do one thing at a time." | Then {friend} the {friend_kind} showed {him} a trick. "Breathe in, and do not look at your feet," said {friend}. | "You are almost there," called {friend} the {friend_kind}. "Once more!"
end: {name} listened, tried again, and it worked. Now {he} could {skill}, and everyone cheered. | After a week, {name} could {skill} better than anyone in the village. | And suddenly, {he} could do it. {name} was so proud that {he} showed it to everybody.
sum: {name} the {kind} wants to {skill}, practices a lot and learns it with the help of {friend}.
qa: What did {name} want to do? = {name} wanted to {skill}.
qa: Who helped {name}? = {friend} the {friend_kind} helped {him}.

ask: who makes {food} | who bakes {food} | who cooks {food} | who wants to make {food}
begin: One morning, {name} wanted to make {food}. | It was a rainy day, so {name} decided to make {food}. | {name} was hungry, and {he} felt like making {food}.
feel: {He} put on a hat and washed {his} hands. | {He} had never made it alone before. | "How hard can it be?" {he} said.
try: But there was no flour left in the house. | {He} mixed everything in a big bowl, and half of it landed on the floor. | {He} looked for the recipe, but the page was gone.
turn: {friend} the {friend_kind} knocked at the door. "I have all that you need," {friend} said. | So {he} asked {friend} the {friend_kind} for help, and they began again together. | {friend} the {friend_kind} smelled it from far away and came to help.
end: Soon the whole house smelled good. They ate together, and nothing was left. | It did not look perfect, but it was the best they had ever eaten. | When it was ready, {name} gave the first piece to {friend}.
sum: {name} the {kind} makes {food}, and {friend} helps.
qa: What did {name} make? = {name} made {food}.
qa: Who came to help? = {friend} the {friend_kind} came to help.

ask: who shares {food} | who does not want to share {food} | who has {food} | who learns to share
begin: {name} had {food}, and it was all for {him}. | One day, {name} got {food} from {his} grandma.
feel: It smelled wonderful. | {He} wanted to eat all of it alone. | {He} sat down in the sun to eat.
try: {friend} the {friend_kind} came by and looked at it. "I had no breakfast," said {friend}. | Just then, {friend} the {friend_kind} sat down next to {him} with nothing to eat.
turn: {name} thought about it. Then {he} cut everything into two equal parts. | First {name} looked away. But then {he} remembered how it feels to be hungry. | "Would you like some?" asked {name} after a while.
end: They ate side by side, and it tasted twice as good. | "Thank you, {name}," said {friend}. The next day, {friend} brought {him} some berries. | {name} had less to eat that day, but {he} had a new friend.
sum: {name} the {kind} has {food} and shares it with {friend}.
qa: What did {name} share? = {name} shared {food}.
qa: Who was hungry? = {friend} the {friend_kind} was hungry.

ask: who helps {other} | who meets {other} | and {other}
begin: One day, {name} met {other} {place}. | On a cold morning, {he} saw {other} {place}.
feel: "What is the matter?" asked {name}. | {He} saw at once that something was wrong.
try: "I cannot get home," was the answer. "The way is too long, and I am tired." | "I have not eaten since yesterday," was the answer. | "I lost my way, and nobody stops for me," was the answer.
turn: {name} did not think twice. {He} called {friend} the {friend_kind}, and together they found a way to help. | "Wait here," said {name}. {He} ran home and came back with warm soup and a blanket.
end: Before it was dark, all was well again. {name} was glad that {he} had stopped. | "You have a good heart," they told {him}, and {name} turned red. | That night, {name} slept very well, because {he} had done something good.
sum: {name} the {kind} meets {other} {place} and helps.
qa: Who did {name} meet? = {name} met {other}.
qa: Where did they meet? = They met {place}.

ask: who gets lost {place} | who gets lost | who cannot find the way home | who is lost
begin: One evening, {name} got lost {place}. | {name} followed a butterfly {place}, and when {he} looked up, {he} did not know the way back.
feel: It was getting dark, and {he} was all alone. | Everything looked strange. | {He} sat down and began to cry a little.
try: {He} walked to the left, but there was only a wall of trees. {He} walked to the right, but there was only water. | {He} called as loud as {he} could, but only the wind answered.
turn: Then a soft voice said, "Follow me." It was {friend} the {friend_kind}. | After a while, {he} saw a small light. It was {friend} the {friend_kind} with a lamp. | {He} remembered what {his} mother had told {him}: "Stay where you are, and I will find you." So {he} waited, and soon {friend} the {friend_kind} came.
end: Together they walked home, and {name} held on tight. | At last, {name} saw the light of {his} house. {His} mother hugged {him} for a long time. | From that day on, {name} always told somebody where {he} was going.
sum: {name} the {kind} gets lost {place}, and {friend} brings {him} home.
qa: Where did {name} get lost? = {name} got lost {place}.
qa: Who found {name}? = {friend} the {friend_kind} found {him}.

ask: who makes a new friend | who has no friends | who is lonely | who finds a friend | about friendship | about two friends
begin: {name} had no friends, and {he} was often alone. | {name} was new there, and nobody knew {him} yet.
feel: {He} watched the others play and did not dare to ask. | In the evenings, {he} talked to the moon.
try*: One day, {he} took {his} {thing} and sat down {place}. | One day, {he} took all {his} courage and said "Hello" to everyone {he} met.
turn*: {friend} the {friend_kind} stopped. "I like that," said {friend}. "May I sit with you?" | Most of them were busy. But {friend} the {friend_kind} smiled and said "Hello" back.
end: They talked until the sun went down. {name} was not alone any more. | The next day, they met again, and the day after, too. That is how they became friends. | "Shall we meet tomorrow?" asked {friend}. {name} nodded so hard that they both laughed.
sum: {name} the {kind} is lonely and becomes friends with {friend}.
qa: Who became {name}'s friend? = {friend} the {friend_kind} became {name}'s friend.
qa: Why was {name} sad? = {name} was sad because {he} had no friends.

ask: who cannot sleep | who can't sleep | who does not want to go to bed | who stays up late
begin: One night, {name} could not sleep. | It was late, but {name} was wide awake.
feel: {He} turned to the left and to the right. | The moon shone in through the window.
try: {He} counted sheep, but the sheep only made {him} laugh. | {He} drank a cup of warm milk, but that did not help. | {He} got up and looked at the stars.
turn: {His} grandma heard {him}. She sat down on the bed and sang a quiet song. | Then {he} heard the rain on the roof. Drip, drop, it said. | {friend} the {friend_kind} was awake too. "Close your eyes and think of the best thing of the day," said {friend}.
end: Before the song was over, {name} was asleep. | {name} yawned, pulled up the blanket and closed {his} eyes. Good night, {name}. | {name} thought of it, smiled, and slept until the morning.
sum: {name} the {kind} cannot sleep, until something quiet makes {him} tired.
qa: What was the problem? = {name} could not sleep.

ask: who tells a lie | who breaks {a_thing} | who does something wrong | about telling the truth
begin: One day, {name} broke {a_thing} that belonged to {his} mother. | While {name} was playing, {his} mother's {thing} fell down and broke.
feel: {He} hid the pieces quickly. | {His} face turned red.
try: "Who did this?" asked {his} mother. "It was the wind," said {name}. | When {his} mother asked, {he} said that {he} knew nothing about it.
turn: But the lie felt heavy, like a stone in {his} pocket. {He} could not eat, and {he} could not play. | That night, {he} lay awake. "A lie does not go away," {friend} the {friend_kind} had told {him} once.
end: In the morning, {name} told the truth. "Thank you for telling me," said {his} mother, and they fixed it together. | So {he} went to {his} mother and said, "It was me. I am sorry." She hugged {him}, and the stone was gone.
sum: {name} the {kind} breaks {a_thing}, tells a lie and then the truth.
qa: What did {name} break? = {name} broke {his} mother's {thing}.
qa: Did {name} tell the truth? = Yes. At first {he} lied, but in the end {he} told the truth.

ask: who says sorry | who is angry | who has a fight with a friend | who shouts at a friend
begin: {name} and {friend} the {friend_kind} were best friends, but one day they had a fight over {a_thing}. | One afternoon, {name} was so angry that {he} shouted at {friend} the {friend_kind}.
feel: They did not speak for two days. | {friend} went home without a word.
try: {name} played alone, but it was no fun. | {name} told {himself} that it was not {his} fault. But it did not feel right.
turn: Then {he} drew a picture of the two of them. | "What would make it good again?" {he} asked {his} father. "Two small words," said {his} father.
end: "I am sorry," said {name} at {friend}'s door. "Me too," said {friend}, and they went out to play. | {He} ran to {friend} and said it: "I am sorry." And the fight was over.
sum: {name} the {kind} has a fight with {friend}, and says sorry.
qa: Who was {name}'s friend? = {friend} the {friend_kind} was {name}'s friend.
qa: How did it end? = {name} said sorry, and they were friends again.

ask: who plants a seed | who grows a flower | who has a garden | about a garden
begin: In the spring, {name} planted a seed {place}. | {friend} the {friend_kind} gave {name} a tiny seed, and {he} put it into the soil.
feel: {He} gave it water every morning. | "Grow, little seed," {he} whispered.
try: A week went by, and nothing happened. | For days, there was only brown soil to see. {name} wanted to dig it up.
turn: "You must be patient," said {his} grandfather. "Good things need time." | But {he} waited, and one day there was a green tip, as small as a pin.
end: In the summer, there stood a big yellow flower, taller than {name}. | The plant grew and grew, and in autumn it carried a pumpkin as big as a chair. | When it bloomed, bees came from far away, and {name} was the happiest gardener of all.
sum: {name} the {kind} plants a seed, waits for a long time and gets a big plant.
qa: What did {name} plant? = {name} planted a seed.
qa: When did {name} plant it? = In the spring.

ask: who waits for the snow | who plays in the snow | and the snow | about winter
begin: It was winter, and {name} waited for the snow. | {name} had never seen snow before.
feel: Every morning, {he} ran to the window. | "When will it come?" {he} asked.
try: But there was only rain, day after day. | {He} hung up paper stars to call it.
turn: Then one night, it became very quiet outside. | "Look up," said {friend} the {friend_kind} one evening. Something white was floating down.
end: In the morning, the whole world was white. {name} and {friend} built a snowman with a carrot nose. | {name} ran out, fell into the snow and laughed. It was cold, and it was wonderful.
sum: {name} the {kind} waits for the snow, and at last it comes.
qa: What did {name} wait for? = {name} waited for the snow.

ask: who goes on a trip | who wants to see the sea | who travels | who goes to the sea
begin: One summer day, {name} packed a bag and went on a trip. | {name} wanted to see the sea, which {he} knew only from books.
feel: {He} took bread, a map and {his} {thing}. | {friend} the {friend_kind} came along.
try: The way went over three hills and through a dark forest. | {name} missed the train and had to walk. {His} feet hurt. | On the second day, it rained, and {name} slept in a barn.
turn: Then the air smelled of salt. | From the top of the last hill, {he} saw something blue.
end: There was the sea, wide and shining. {name} stood still and did not say a word. | {name} ran down to the water and let it tickle {his} feet. In {his} bag, {he} took home a shell.
sum: {name} the {kind} goes on a long trip and sees the sea.
qa: What did {name} see at the end? = {name} saw the sea.
qa: What did {name} take along? = {name} took {his} {thing} along.

ask: who has a birthday | who gets a present | about a birthday
begin: It was {name}'s birthday, but nobody said anything about it. | {name} woke up early, for it was {his} birthday.
feel: At breakfast, everything was as always. | "Did they all forget?" {he} thought.
try: {He} went to see {friend} the {friend_kind}, but {friend} was not at home. | {He} walked around all day, and nobody was to be seen.
turn: When {he} came home in the evening, it was dark and quiet. {He} opened the door. | Then {he} found a note: "Come to the old tree."
end: "Surprise!" they all called. There was a cake, and {friend} gave {him} {a_thing}. | All {his} friends were there with lights and a cake. It was the best birthday of all.
sum: {name} the {kind} thinks that everyone forgot {his} birthday, but there is a surprise.
qa: What did {name} think? = {name} thought that everyone forgot {his} birthday.

ask: who wins a race | who runs a race | who loses a race | who is slow
begin: There was a big race {place}, and {name} wanted to take part. | {friend} the {friend_kind} said to {name}, "I am faster than you. Let us race!"
feel: {name} was not the fastest, and {he} knew it. | {His} legs were shaking.
try: At the start, all the others ran ahead. | Halfway, {he} was far behind.
turn: Then {friend} the {friend_kind} fell over a root and could not get up. {name} stopped and helped. | But {he} kept on going, step by step, and did not look to the side.
end: {name} did not win, but everyone clapped for {him} the loudest. | One by one, the others got tired. {name} came in first and could hardly believe it.
sum: {name} the {kind} runs a race and does {his} best.
qa: What did {name} take part in? = {name} ran a race.

ask: who builds a house | who wants a house | who builds something
begin: {name} wanted to build a little house {place}. | "I will build a house of my own," said {name} one day.
feel: {He} had wood, nails and a good plan. | {friend} the {friend_kind} thought that {he} was too small for that.
try: The first wall fell down. The second one, too. | The wind came at night and blew the roof away.
turn: {friend} came with a rope and a ladder. "Now we do it together," {friend} said. | {name} thought for a while and made the walls thicker.
end: At last, the little house was ready, and {name} had supper in it. | When the next storm came, the house stood firm, and {name} slept well in it.
sum: {name} the {kind} builds a little house and does not give up.
qa: What did {name} build? = {name} built a little house.

ask: who looks at the stars | who wants to go to the moon | who catches a star | and the moon
begin: Every night, {name} looked up at the stars. | {name} had one big wish: to visit the moon.
feel: "Who lives up there?" {he} asked. | It all seemed so near.
try: {He} climbed the highest tree, but the sky was still far away. | {He} built a long ladder, but it was too short.
turn: "You cannot reach the sky," said {friend} the {friend_kind}. "But come with me to the pond." | {friend} the {friend_kind} took {him} down to the pond.
end: There, in the still water, lay the moon and all the stars. {name} touched them with one finger. | And there they were, right in front of {him}, in the water. "Good night, moon," said {name}.
sum: {name} the {kind} wants to reach the stars and finds them in the water.
qa: Where did {name} find the stars? = {name} saw them in the water.

ask: who hears a strange sound | who hears a noise | and the strange noise | about a mystery
begin: One night, {name} heard a strange sound {place}. | Tap, tap, tap! {name} sat up in bed. What was that?
feel: {He} pulled the blanket up to {his} nose. | {He} lit a small lamp.
try: "Is anyone there?" {he} called. There was no answer. | {He} went down on tiptoe and looked behind the door. Nothing.
turn: The sound came again, and {name} followed it. | "Let us look together," whispered {friend} the {friend_kind}.
end: It was only a branch that knocked at the window. {name} laughed and went back to bed. | It was a baby bird that had lost its nest. {name} kept it warm until the morning.
sum: {name} the {kind} hears a strange sound and finds out what it is.
qa: What did {name} hear? = {name} heard a strange sound.

ask: who cleans the room | whose room is a mess | who does not like to tidy up | who is lazy
begin: {name}'s room was a mess, and {he} could not find {his} {thing}. | {name} never wanted to tidy up.
feel: There were socks on the lamp. | "I will do it tomorrow," {he} always said.
try: One day, {friend} the {friend_kind} came to visit and fell over a box. | But then there was no place left to play.
turn: So {he} and {friend} the {friend_kind} made a game of it: who can find ten things first? | {name} turned on some music and began in one corner.
end: After an hour, the room was clean, and the {thing} lay under the bed. | It was done in no time, and it had even been fun.
sum: {name} the {kind} cleans a messy room and finds {his} {thing}.
qa: What was in {name}'s room? = It was a mess, with things everywhere.

ask: who misses grandma | who visits grandma | and {his} grandma | who writes a letter
begin: {name} missed {his} grandma, who lived far away. | {name}'s grandma lived on the other side of the mountains.
feel: {He} had so much to tell her. | Her house always smelled of apples.
try*: So {he} wrote her a letter and put a drawing of {a_thing} into it. | {He} asked {his} mother every day, "When do we go?"
turn*: A week later, there was a knock at the door. | Then a letter came with a ticket in it.
end*: It was grandma! "I came as soon as I read it," she said, and {name} did not let go of her hand. | Soon {name} sat in her kitchen and told her everything.
sum: {name} the {kind} misses grandma and sees her again.
qa: Who did {name} miss? = {name} missed {his} grandma.

ask: who is sick | who has a cold | who stays in bed
begin: One day, {name} was sick and had to stay in bed. | {name} had a cold, and {his} nose was red.
feel: Outside, the others were playing. | {He} was bored.
try: {He} counted the spots on the wall. There were forty. | The soup was too hot, and the tea was too bitter.
turn: Then {friend} the {friend_kind} climbed up to the window and made funny faces. | {friend} the {friend_kind} brought a book and read to {him}.
end: {name} laughed so much that {he} forgot to be sick. | After three days, {name} was well again, and {he} ran out into the sun.
sum: {name} the {kind} is sick, and {friend} makes {him} laugh.
qa: Who came to visit? = {friend} the {friend_kind} came to visit.

ask: who keeps a secret | who has a secret | and a secret
begin: {friend} the {friend_kind} told {name} a secret. | "Can you keep a secret?" asked {friend} the {friend_kind}. {name} nodded.
feel: It was a big one, and it tickled on {his} tongue. | {name} had never kept one before.
try: Everyone wanted to know it. "Tell us!" they said. | At lunch, {he} almost said it. {He} had to hold {his} mouth shut.
turn: But {name} shook {his} head and said nothing. | {He} told it to nobody but the old tree, and trees do not talk.
end: On Sunday, the secret came out: {friend} had made {a_thing} for {name}. "You really can keep a secret," said {friend}. | "I knew that I could trust you," said {friend}.
sum: {name} the {kind} keeps a secret for {friend}.
qa: Whose secret was it? = It was {friend}'s secret.

ask: who wants to be big | who is too small | who wants to be bigger | who is very small
begin: {name} did not like to be so small. | {name} was the smallest of all, and {he} wanted to be big.
feel: {He} could not reach the berries. | The others did not see {him} when they played.
try: {He} ate a lot and stretched every morning, but {he} stayed small. | {He} stood on a box, and the box fell over.
turn: Then {friend} the {friend_kind} got stuck in a hole {place}, and nobody big could get in. | One day, the key of the big door fell into a narrow gap.
end: Only {name} was small enough to help. "Hurray for {name}!" they all called. | {name} slipped in, and a moment later all was well. Now {he} knew that small is good, too.
sum: {name} the {kind} wants to be big, but being small turns out to be good.
qa: What did {name} want? = {name} wanted to be big.

ask: who finds a treasure | who finds an old map | and the treasure | who looks for gold
begin: In an old book, {name} found a map with a red cross on it. | "There is a treasure {place}," read {name} on an old piece of paper.
feel: {His} eyes grew wide. | {He} took a shovel and ran.
try: {He} dug here and {he} dug there, but there were only stones. | {friend} the {friend_kind} held the map, and {name} dug until it was dark.
turn: At last, the shovel hit something hard. It was a box. | "Turn the map around!" said {friend} the {friend_kind}. They had read it upside down.
end: In the box was no gold, but {a_thing} and a note: "The best treasure is a friend." | They opened the box. It was full of old coins, and they shared them with everyone in the village.
sum: {name} the {kind} follows an old map and finds a box.
qa: What did {name} find in the book? = {name} found a map.

ask: who meets a dragon | and the dragon | who meets a giant | who meets a monster
begin: One day, {name} met a huge dragon {place}. | Everyone said that a dragon lived {place}, and {name} wanted to see it.
feel: Smoke came out of its nose. | {name} wanted to run, but {his} feet did not move.
try: "Are you going to eat me?" asked {name}. "No," said the dragon. "I only eat {food}." | "Why are you crying?" asked {name}, for the dragon had tears in its eyes.
turn: "Everyone runs away from me," said the dragon. "I am so alone." | The dragon had a thorn in its foot, and {name} pulled it out.
end: So {name} stayed, and the dragon made a warm fire for the two of them. | After that, {name} was the only one in the land who had a dragon for a friend.
sum: {name} the {kind} meets a dragon and becomes its friend.
qa: Who did {name} meet? = {name} met a dragon.

ask: who has a magic {thing} | who gets a wish | who finds a magic {thing} | about magic
begin: One day, {name} found a magic {thing} {place}. | An old woman gave {name} {a_thing}. "It is magic," she said. "You have one wish."
feel: It shone in the dark. | {name} did not know what to wish for.
try: {He} thought of a castle. {He} thought of a hundred cakes. | "Wish for gold!" said one. "Wish for wings!" said another.
turn: Then {he} saw {friend} the {friend_kind}, who was sick and sad. | On the way home, {he} met {friend} the {friend_kind}, who had lost everything in the storm.
end: "I wish that all is well again for {friend}," said {name}. And so it was. | {name} gave the wish away, and {he} never felt sorry about it.
sum: {name} the {kind} gets a wish and uses it for {friend}.
qa: What was magic? = The {thing} was magic.

ask: who saves the day | who is a hero | who is brave | who saves {other}
begin: One day, there was a storm, and the river rose higher and higher. | One night, a barn was on fire, and {name} was the first to see it.
feel: Everyone was afraid. | There was no time to lose.
try: {name} ran from house to house and woke everyone up. | {name} rang the big bell as loud as {he} could.
turn: Then {he} heard a cry. {friend} the {friend_kind} could not get out! | "Where is {friend}?" somebody called. {name} ran back.
end: {name} took {friend} by the hand, and together they got out. Everyone said that {he} was a hero. | In the end, all were safe, and {name} was so tired that {he} slept for a whole day.
sum: {name} the {kind} sees the danger first and saves {friend}.
qa: Who did {name} save? = {name} saved {friend} the {friend_kind}.

ask: who loves to sing | who sings | who makes music | who plays the drum | about music
begin: {name} loved music and made it all day long. | From morning to night, {name} sang.
feel: But {his} voice was loud and a little wrong. | {He} sang in the bath and {he} sang in bed.
try*: "Please be quiet!" called the neighbors. So {name} stopped, and everything was silent. | {He} wanted to sing at the summer party, but {he} did not dare.
turn*: After a week, {friend} the {friend_kind} came. "Why is it so quiet here? I miss your songs," {friend} said. | "I will play the drum for you," said {friend} the {friend_kind}.
end*: So {name} sang again, and this time they all sang along. | On the day of the party, {name} sang, and people danced until the stars came out.
sum: {name} the {kind} loves to sing, and in the end everyone sings along.
qa: What did {name} love? = {name} loved music.
""")

OPENINGS = ways(
    """Once upon a time, there was a {trait} {kind} named {name}. {He} lived {home}. |
Once there was a {trait} {kind} named {name} who lived {home}. | {name} was a {trait} {kind} who lived {home}. |
There was once a {trait} {kind} named {name}. {He} lived {home}. | {Home}, there lived a {trait} {kind} named {name}. |
{name} was a {trait} {kind}. {He} lived {home} with {his} family. | {name} the {kind} lived {home}. {He} was very {trait}. |
Long ago, a {trait} {kind} lived {home}. {His} name was {name}. | Far away, {home}, lived {name}, a {trait} {kind}.""".replace(
        "\n", " "
    )
)
DETAILS = ways(
    """Everyone there liked {him}. | {He} liked to get up early and watch the sun rise. | {His} best friend was {friend}, a {friend_kind}. |
{He} liked {food} more than anything else. | On Sundays, {he} visited {his} grandma. | In {his} pocket, {he} always had a small stone for luck. |
{He} had two brothers and one sister. | In the evenings, {he} liked to listen to the wind. | {He} had never been far from home. |
{He} always wore a blue scarf. | The days there were long and quiet. | {He} knew every tree and every stone around there. |
{He} was not big, but {he} had a big heart. | Most of all, {he} loved to laugh.""".replace("\n", " ")
)
MORALS = ways(
    """{name} never forgot that day. | And {name} learned that it is good to ask for help. | And if you go there today, you may still meet {name}. |
That evening, {name} told the whole story at home. | It had been a long day, and a good one. | And everyone was happy. | The end. |
From then on, {name} smiled whenever {he} thought of it. | And that is the end of the story.""".replace("\n", " ")
)
# What "and then?" brings: an episode after the end, each of three stages.
NEXT = blocks("""
a: The next morning, {name} woke up early. | The next day, the sun was shining, and {name} went outside.
b: {friend} was already waiting at the door with {food}. | At the door lay a letter from {friend}.
c: They had breakfast together and made plans for the summer. | "Come and visit me today," it said, so {name} put on {his} shoes and went.

a: Then {name} went home and told {his} mother everything. | In the evening, {name} told {his} family the whole story.
b: They listened with big eyes. | "You did very well," {his} mother said.
c: Then they all ate {food}, and {name} went to bed, tired and happy. | {name} fell asleep with a smile on {his} face.

a: A week later, {name} met {friend} again {place}. | Some days later, {friend} came to visit.
b: "Do you remember that day?" asked {friend}. "I think of it often," said {name}. | They talked about all that had happened, and they laughed a lot.
c: Then they walked to the river and watched the boats until it was dark. | And they promised to be friends for ever.

a: Then something new happened. | But that was not all.
b: On the way home, {name} saw {other} by the road. | {friend} called from the hill, "Come quickly, {name}!"
c: {name} stopped to help, for {he} knew now how good that feels. | There was a rainbow, so bright that they both stood still and looked.

a: After that, {name} had a new idea. | Then {name} sat down and thought about it all.
b: "Tomorrow, I will show {friend} how to do it, too," {he} said. | "I want to write all this down," {he} said.
c: And the next day, {he} did just that. | {He} took a pen and paper and began: "Once upon a time."

a: Winter came, and snow lay on the roofs. | Then summer came, and the days were long.
b: {name} and {friend} saw each other every day. | {name} grew a little taller.
c: And when they were old, they still told this story to their children. | And {he} was ready for the next adventure.
""")
