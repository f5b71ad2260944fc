# ruff: noqa: E501 (one entry a line)
"""Words that plans are made of: who, where, what, and the first sentence of every answer.

Hand-written on purpose: the teacher is small and says false things about the world, so the sentence that carries the
fact stands here and the teacher only goes on from it. One entry a line, columns divided by `|`. `plans` combines them.
"""

from __future__ import annotations


def rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in line.split("|")) for line in text.strip().splitlines()]


def words(text: str) -> list[str]:
    return [word.replace("_", " ") for word in text.split()]


GIRLS = words("""Mia Lily Anna Rosa Ella Nina Zoe Lucy Ruby Emma Clara Daisy Grace Ivy Molly Sara Tina Hana Maya Nora
Poppy Stella Wendy Bella Kate Amy Jane Sophie Lena Dora""")
BOYS = words("""Tom Ben Sam Max Leo Jack Finn Noah Otto Pip Theo Oscar Hugo Bruno Felix Charlie Danny Eddie Henry Luke
Milo Peter Rudy Simon Tim Will Alex Bobby Carl Gus""")
KINDS = words("""fox bear rabbit mouse duck frog cat dog squirrel owl hedgehog pony turtle goat lamb kitten puppy bird
penguin lion elephant monkey panda beaver badger hen pig bee snail whale seal deer robot dragon""")
CHILDREN = {"girl": "she", "boy": "he"}
TRAITS = words("little small kind brave shy happy curious clever lazy busy funny quiet gentle young hungry tired")
HOMES = rows("""
in a small house by the sea
in a green forest
on a farm near a river
in a little village
under a big old tree
in a cozy cottage on a hill
near a blue lake
in a tall house in the city
at the edge of a meadow
in a warm cave in the mountains
next to a quiet pond
on a small island
""")
PLACES = rows("""
in the forest
in the garden
at the beach
near the river
in the park
on the hill
behind the house
in the attic
under the bed
at school
at the market
in the snow
in the kitchen
by the old bridge
in the barn
on the way home
""")
THINGS = words("""red_ball shiny_stone golden_key old_map blue_hat small_box silver_bell wooden_boat yellow_kite lost_letter
magic_seed picture_book broken_toy warm_scarf tiny_lamp paper_star glass_jar green_umbrella toy_train music_box drum
teddy_bear white_feather big_pumpkin red_balloon little_egg strange_shell silver_coin old_clock little_bell""")
FOODS = words("""cake apple_pie bread soup pizza pancakes cookies a_sandwich berries honey carrots cheese strawberry_jam
porridge a_salad muffins""")
FEARS = words("""the_dark thunder deep_water the_wind big_dogs high_places loud_noises the_night strangers spiders
the_old_house the_first_day_of_school""")
SKILLS = words("""swim fly sing dance read paint run_fast climb_trees ride_a_bike bake_bread play_the_drum jump_high
whistle count_to_ten skate catch_fish build_a_house grow_flowers tell_jokes fix_toys""")
OTHERS = words("""an_old_man a_lost_kitten a_baby_bird a_sad_friend a_tired_farmer a_hungry_mouse a_little_bee
a_sick_neighbor an_old_turtle a_small_child a_cold_puppy""")

# topic of the question | the sentence that starts the second part | one that may end the story
PLOTS = rows("""
who finds {a_thing} | One day, {name} found {a_thing} {place}. | {name} kept the {thing} for a long time.
who finds {a_thing} {place} | One morning, {name} saw {a_thing} {place}. | In the end, {name} took the {thing} home.
who loses {a_thing} | One day, {name} could not find {his} {thing}. | At last, {name} found the {thing} {place}.
who gives away {a_thing} | {name} had {a_thing}, and {he} loved it. | So {name} gave the {thing} to {friend}.
who is afraid of {fear} | But {name} was afraid of {fear}. | After that, {name} was not afraid of {fear} any more.
who is not afraid of {fear} | Everyone was afraid of {fear}, but {name} was not. | Everyone said that {name} was very brave.
who wants to {skill} | More than anything, {name} wanted to {skill}. | Now {name} could {skill}, and {he} was proud.
who learns to {skill} | {name} could not {skill}, and that made {him} sad. | At last, {name} could {skill}.
who teaches a friend to {skill} | {name}'s friend {friend} wanted to {skill}. | Now they could both {skill}.
who makes {food} | One morning, {name} wanted to make {food}. | {name} and {friend} ate together, and it was very good.
who shares {food} | {name} had {food}, but {his} friend {friend} had nothing to eat. | {friend} said, "Thank you, {name}."
who eats too much | {name} loved {food}, and one day {he} ate too much. | The next time, {name} ate only a little.
who helps {other} | One day, {name} met {other} {place}. | {name} was glad that {he} could help.
who gets lost {place} | One evening, {name} got lost {place}. | At last, {name} was home again.
who makes a new friend | {name} had no friends, and {he} was often alone. | Now {name} was not alone any more.
who makes a new friend {place} | One day, {name} met {a_kind} named {friend} {place}. | From that day on, {name} and {friend} were good friends.
who cannot sleep | One night, {name} could not sleep. | Then {name} closed {his} eyes and fell asleep.
who tells a lie | One day, {name} told a lie to {his} mother. | {name} said, "I am sorry. I will tell the truth."
who says sorry | {name} was angry and shouted at {his} friend {friend}. | "I am sorry," said {name}.
who plants a seed | In the spring, {name} planted a seed in the garden. | In the summer, there was a big yellow flower in the garden.
who waits for the snow | It was winter, and {name} waited for the snow. | The next morning, everything was white.
who plays in the rain | It rained all day, but {name} wanted to play. | Then {name} went inside and put on dry clothes.
who goes on a trip | One summer day, {name} went on a trip with {his} family. | In the evening, {name} was tired but happy.
who has a birthday | It was {name}'s birthday, and {he} was very happy. | It was the best birthday of all.
who wins a race | There was a big race {place}, and {name} wanted to win. | {name} won the race, and everyone cheered.
who loses a race | {name} and {friend} wanted to see who was faster. | {friend} won the race, but {name} was not sad.
who builds a house | {name} wanted to build a little house {place}. | At last, the little house was ready.
who sees a rainbow | After the rain, {name} saw a rainbow in the sky. | {name} never forgot the rainbow.
who looks at the stars | Every night, {name} looked up at the stars. | The stars were bright, and {name} was happy.
who hears a strange sound | One night, {name} heard a strange sound {place}. | It was only the wind, and {name} laughed.
who does not want to share | {name} had {a_thing}, but {he} did not want to share it. | Then {name} and {friend} played together.
who does not want to go to bed | It was late, but {name} did not want to go to bed. | Soon {name} was fast asleep.
who cleans the room | {name}'s room was a mess, and {he} could not find {his} {thing}. | Now the room was clean, and there was the {thing}.
who misses grandma | {name} missed {his} grandma, who lived far away. | The next day, grandma came to visit.
who is sick | One day, {name} was sick and had to stay in bed. | After three days, {name} was well again.
who makes a gift | {name} wanted to make a gift for {his} mother. | {His} mother loved the gift.
who rides on a train | {name} had never been on a train before. | {name} wanted to ride on a train again.
who keeps a secret | {friend} told {name} a secret. | {name} did not tell the secret to anyone.
who finds the way home | {name} walked too far and did not know the way home. | At last, {name} saw the light of {his} house.
who wants to be big | {name} did not like to be so small. | Now {name} knew that small is good too.
""")
OPENINGS = rows("""
Once upon a time, there was a {trait} {kind} named {name}. {He} lived {home}.
Once there was a {trait} {kind} named {name} who lived {home}.
{name} was a {trait} {kind} who lived {home}.
There was once a {trait} {kind} named {name}.
{Home}, there lived a {trait} {kind} named {name}.
{name} was a {trait} {kind}. {He} lived {home} with {his} family.
{name} the {kind} lived {home}. {He} was very {trait}.
""")
MIDDLES = rows("""
Then {name}
So {he}
At first, {he}
Suddenly,
The next day,
{His} friend {friend}
{His} mother
{name} thought for a while.
"What can I do?" asked {name}.
{friend} the {other_kind} came by and said,
"Can I help you?" asked {friend}.
But then
After a while,
{name} looked around and
""")
ENDINGS = rows("""
In the end,
From that day on,
At last,
That night,
{name} was happy because
After that day,
When {name} came home,
{name} smiled and said,
Everyone was happy, and
{name} learned that
""")
STORY_REQUESTS = rows("""
Tell me a story about {topic}.
Write a short story about {topic}.
Can you tell me a story about {topic}?
Please write a little story about {topic}.
I want to hear a story about {topic}.
Tell me about {topic}.
A story about {topic}, please.
""")

# thing | what it is. Asked for in several ways.
NOUNS = rows("""
a dog | a friendly animal that lives with people
a cat | a small animal with soft fur that likes to sleep and hunt mice
a cow | a big farm animal that gives us milk
a horse | a large, strong animal that people can ride
a hen | a bird that lives on a farm and lays eggs
a duck | a bird that can swim, walk and fly
a fish | an animal that lives in water and swims with its fins
a frog | a small green animal that lives near ponds and can jump far
a bee | a small insect that makes honey
a spider | a small animal with eight legs that makes a web
a butterfly | an insect with large, colorful wings
a bird | an animal with feathers and two wings
an owl | a bird that hunts at night and has big round eyes
a lion | a large wild cat that lives in Africa
an elephant | a very large animal with a long trunk and big ears
a whale | a very large animal that lives in the sea
a bear | a big, strong animal with thick fur that lives in the forest
a rabbit | a small animal with long ears that eats grass
a mouse | a tiny animal with a long tail
a snake | a long animal without legs
a turtle | an animal that carries a hard shell on its back
a tree | a tall plant with a trunk, branches and leaves
a flower | the colorful part of a plant
a seed | a small thing that can grow into a new plant
a forest | a large place with many trees
a garden | a place where people grow flowers and vegetables
a river | a long stream of water that flows to the sea
a lake | a large area of water with land all around it
a mountain | a very high piece of land
an island | a piece of land with water all around it
a beach | a place with sand next to the sea
a desert | a dry place with little rain and much sand
the sun | a star that gives us light and warmth
the moon | a big ball of rock that goes around the Earth
a star | a huge ball of hot gas that shines far away in the sky
a cloud | many tiny drops of water that float in the sky
rain | water that falls from the clouds
snow | soft white ice that falls from the sky in winter
ice | water that is so cold that it is hard
wind | air that moves
a rainbow | a band of colors in the sky that comes after the rain
a storm | a time of strong wind and heavy rain
spring | the season when flowers begin to grow
summer | the warmest season of the year
winter | the coldest season of the year
an apple | a round fruit that grows on a tree
a banana | a long yellow fruit
an orange | a round fruit with a thick skin and sweet juice
a carrot | an orange vegetable that grows under the ground
a potato | a vegetable that grows under the ground
bread | a food made from flour and water and baked in an oven
cheese | a food made from milk
milk | a white drink that comes from cows
honey | a sweet food that bees make
soup | a warm food that you eat with a spoon
a spoon | a tool that you use to eat soup
a knife | a tool that you use to cut things
a cup | a small thing that you drink from
a table | a piece of furniture with a flat top
a chair | a piece of furniture that you sit on
a bed | a piece of furniture that you sleep on
a lamp | a thing that gives light in the dark
a clock | a thing that shows what time it is
a key | a small piece of metal that opens a lock
a door | a part of a house that you can open and close
a window | an opening in a wall that lets in light
a house | a building where people live
a kitchen | a room where people cook food
a school | a place where children learn
a library | a place where you can borrow books
a hospital | a place where doctors help sick people
a market | a place where people buy and sell food
a farm | a place where people grow food and keep animals
a city | a large place where many people live
a village | a small place where few people live
a bridge | a way for people to go over a river
a road | a way for cars and people to travel
a car | a machine with four wheels that takes people from place to place
a train | a long machine that runs on rails
a boat | a thing that floats and carries people over water
a plane | a machine that flies through the air
a bike | a thing with two wheels that you ride with your feet
a book | many pages with words and pictures
a letter | a message that you write on paper
a map | a picture that shows where places are
a ball | a round thing that you can throw, kick and catch
a kite | a toy that flies in the wind
a puzzle | a game in which you put pieces together
a song | music with words
a drum | an instrument that you hit to make a sound
a hat | a thing that you wear on your head
a coat | a thing that you wear when it is cold
an umbrella | a thing that keeps you dry in the rain
a friend | a person you like and trust
a family | a group of people who love and care for each other
a baby | a very young child
a teacher | a person who helps children learn
a doctor | a person who helps sick people get well
a farmer | a person who grows food and keeps animals
a baker | a person who makes bread and cakes
a cook | a person who makes meals
a painter | a person who makes pictures with paint
a firefighter | a person who puts out fires
a dream | a story that you see in your mind while you sleep
a birthday | the day of the year on which you were born
a secret | something that you do not tell everyone
a promise | something you say you will do
music | sounds that are nice to hear
time | what a clock measures
water | a clear liquid that all living things need
fire | something hot and bright that burns
""")
NOUN_REQUESTS = rows("""
What is {noun}?
What is {noun}?
Can you tell me what {noun} is?
Tell me about {noun}.
What do you know about {noun}?
Please tell me something about {noun}.
Describe {noun}.
""")
# question | the sentence the answer begins with
QUESTIONS = rows("""
Why do we sleep? | We sleep because our bodies and minds need rest.
Why do we eat? | We eat because food gives us energy.
Why do we drink water? | We drink water because our bodies need it to work well.
Why is the sky blue? | The sky is blue because the air spreads the blue light of the sun.
Why does it rain? | It rains when the drops of water in the clouds become too heavy.
Why do birds fly? | Birds fly to find food and to get away from danger.
Why do leaves fall in autumn? | Leaves fall in autumn because the tree gets ready for the winter.
Why is it good to share? | It is good to share because it makes other people happy.
Why is it good to read? | It is good to read because you learn new things.
Why should I say thank you? | You should say thank you because it is kind and polite.
Why should I say sorry? | You say sorry to show that you did not want to hurt someone.
Why should I wash my hands? | You should wash your hands to keep away germs.
Why should I brush my teeth? | You should brush your teeth to keep them clean and strong.
Why do we go to school? | We go to school to learn to read, write and count.
Why do people work? | People work to earn money and to help others.
Why do cats purr? | Cats often purr when they feel happy and safe.
Why do dogs bark? | Dogs bark to tell us something.
Why do bees like flowers? | Bees like flowers because they find sweet food in them.
Why do we need trees? | We need trees because they clean the air.
Why do we need the sun? | We need the sun because it gives us light and warmth.
Where do fish live? | Fish live in rivers, lakes and the sea.
Where do birds live? | Many birds live in nests in the trees.
Where do bears live? | Bears live in forests and mountains.
Where does milk come from? | Milk comes from cows.
Where does bread come from? | Bread is made from flour, and flour comes from wheat.
Where does honey come from? | Honey comes from bees.
Where does the sun go at night? | The sun does not go away at night, but our side of the Earth turns away from it.
What color is the sky? | The sky is blue on a clear day.
What color is grass? | Grass is green.
What color is snow? | Snow is white.
What color is a banana? | A ripe banana is yellow.
What do cows eat? | Cows eat grass and hay.
What do rabbits eat? | Rabbits eat grass, leaves and carrots.
What do birds eat? | Birds eat seeds, worms and berries.
What does a doctor do? | A doctor helps sick people get well.
What does a teacher do? | A teacher helps children learn new things.
What does a baker do? | A baker makes bread and cakes.
What does a farmer do? | A farmer grows food and takes care of animals.
What can I do on a rainy day? | On a rainy day, you can read a book or draw a picture.
What can I do on a sunny day? | On a sunny day, you can play outside.
What can I do in the snow? | In the snow, you can build a snowman.
What can I do when I am bored? | When you are bored, you can draw, read or play a game.
What can I do when I am sad? | When you are sad, you can talk to a friend.
What can I do when I am angry? | When you are angry, you can take a deep breath.
What can I do when I am afraid? | When you are afraid, you can ask someone to hold your hand.
What should I eat for breakfast? | For breakfast, you can eat bread, eggs or fruit.
What should I wear in winter? | In winter, you should wear a warm coat, a hat and gloves.
What should I take to the beach? | Take a towel, a hat and some water to the beach.
What is the opposite of hot? | The opposite of hot is cold.
What is the opposite of big? | The opposite of big is small.
What is the opposite of happy? | The opposite of happy is sad.
What is the opposite of day? | The opposite of day is night.
What makes a good friend? | A good friend is kind and listens to you.
What makes you happy? | It makes me happy to help people.
What is your name? | I am a small language model.
Who are you? | I am a small language model that writes little stories.
What can you do? | I can tell short stories and answer simple questions.
How many legs does a dog have? | A dog has four legs.
How many legs does a spider have? | A spider has eight legs.
How many days are in a week? | There are seven days in a week.
How do I make a sandwich? | First, take two slices of bread.
How do I make soup? | First, cut some vegetables into small pieces.
How do I make a friend? | Smile, say hello and ask the other child to play.
How do I plant a seed? | First, make a small hole in the soil and put the seed in it.
How do I draw a cat? | First, draw a circle for the head.
How do I build a snowman? | First, roll a big ball of snow.
How do I fall asleep? | Lie down, close your eyes and think of something nice.
How do I take care of a dog? | Give your dog food and water every day.
How do I take care of a plant? | Give your plant water and put it in the light.
How do plants grow? | Plants grow from seeds when they have water, soil and light.
How do fish breathe? | Fish breathe with their gills.
How do birds fly? | Birds fly by moving their wings.
How does a boat float? | A boat floats because it pushes the water away.
When do we see the stars? | We see the stars at night when the sky is clear.
When do flowers grow? | Most flowers grow in spring and summer.
""")
# what somebody says | how the answer begins
TALK = rows("""
Hello! | Hello! It is nice to meet you.
Hi! | Hi there! How can I help you?
Good morning! | Good morning! I hope you slept well.
Good night! | Good night! Sleep well.
Hi, how are you? | I am fine, thank you.
How are you today? | I am very well today, thank you for asking.
My name is {name}. | Hello, {name}! It is nice to meet you.
Hello, I am {name}. | Hello, {name}! What would you like to do today?
I am sad. | I am sorry that you are sad.
I feel lonely. | I am sorry that you feel lonely.
I am happy today! | That is wonderful!
I am tired. | Then you should rest for a while.
I am hungry. | Then let us think of something good to eat.
I am cold. | Then put on a warm sweater.
I am bored. | Let us find something fun to do.
I am afraid of {fear}. | It is fine to be afraid of {fear}.
I lost my {thing}. | I am sorry that you lost your {thing}.
I found {a_thing}. | How exciting! {A_thing} is a nice thing to find.
I have a new {pet}. | How lovely! A {pet} needs food, water and love.
I like to {skill}. | That sounds like fun!
I want to learn to {skill}. | That is a good idea.
I made {food}. | That sounds delicious!
I love {food}. | I understand that very well.
My friend is angry with me. | That must feel bad.
My dog is sick. | I am sorry to hear that your dog is sick.
It is my birthday! | Happy birthday!
It is raining. | Then it is a good day to stay inside.
It is snowing! | How beautiful!
I cannot sleep. | Try to close your eyes and breathe slowly.
I had a bad dream. | A bad dream can feel very real, but it is not.
I won a race! | Well done!
Tomorrow is my first day of school. | How exciting! A first day is always a little scary.
Thank you! | You are welcome!
Can you help me? | Of course I can help you.
Tell me something nice. | You are kind, and the world is better with you in it.
""")
PETS = words("dog cat rabbit bird fish hamster puppy kitten pony turtle")
